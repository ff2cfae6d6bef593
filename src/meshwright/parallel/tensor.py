"""Layers whose parameters are cut over the tensor group, and the loss over cut logits.

Megatron-LM (Shoeybi et al., 2019), section 3, figures 2 and 3; t is the size of the tensor group:

    x (.., i) ──► ColumnParallelLinear ──► (.., o/t) ──► RowParallelLinear ──► y (.., i)
                  forward: nothing                       forward: sum of y
                  backward: sum of dx                    backward: nothing

    tokens ──► VocabularyEmbedding ──► (b, s, h)         logits (b, s, V/t) ──► vocabulary_cross_entropy ──► (b, s)
               forward: sum                              forward: a maximum and two or three sums of b s numbers

A layer is handed its group; a group of one rank moves nothing. A vocabulary that t does not divide is padded at its
end: the padded columns take no part in the loss and get a gradient of exactly zero. Batches may be empty (b = 0).
Sequence parallelism and the gathering of outputs are not here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx, once_differentiable

from meshwright.comm.collectives import sum_over_group
from meshwright.comm.group import Group, Reduction
from meshwright.parallel.parameter import (
    Constant,
    Described,
    Init,
    ParameterSpec,
    Split,
)
from meshwright.parallel.product import input_gradient, linear, weight_gradient


class ColumnParallelLinear(Described):
    """Y = X A^T + b with A's rows (its output features) cut over the group: each rank computes its part of Y.

    Args:
        features: (input, output) features of the whole layer.
        init: of the weight; biases start at 0.
        bias: whether there is one.
        group: the tensor group.
        device, dtype: of the parameters.
        blocks: equal blocks of output features that are each cut by themselves (3 for a fused qkv).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        features: tuple[int, int],
        init: Init,
        bias: bool,
        group: Group,
        device: torch.device,
        dtype: torch.dtype,
        blocks: int = 1,
    ) -> None:
        super().__init__()
        self.group = group
        given, made = features
        split = Split(0, blocks)
        self.declare("weight", ParameterSpec((made, given), init, split), group.size, device, dtype)
        if bias:
            spec = ParameterSpec((made,), Constant(0.0), split, decay=False)
            self.declare("bias", spec, group.size, device, dtype)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """(.., i), equal on all ranks, to this rank's (.., o/t); the gradient of `x` is summed over the group."""
        y: Tensor = _Linear.apply(x, self.weight, self.bias, self.group)  # type: ignore[no-untyped-call]
        return y


class _LinearContext(FunctionCtx):
    """What a product remembers from forward to backward."""

    group: Group
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _Linear(Function):
    """x W^T + b; in backward, f of Megatron-LM's figure 3 over `group`, so that the wait is overlapped."""

    @staticmethod
    def forward(ctx: _LinearContext, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: _LinearContext, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx = dweight = dbias = handle = None
        rows = gradient.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            dx = input_gradient(rows, weight).view(x.shape)
            handle = ctx.group.start_all_reduce(dx, label="tensor-backward")
        # The weight's gradient is computed while the sum above is under way.
        if ctx.needs_input_grad[1]:
            dweight = weight_gradient(rows, x.flatten(0, -2))
        if ctx.needs_input_grad[2]:
            dbias = rows.sum(0)
        if handle is not None:
            handle.wait()
        return dx, dweight, dbias, None


class RowParallelLinear(Described):
    """Y = X A^T + b with A's columns (its input features) cut over the group: the ranks' products are summed.

    The bias is whole on every rank and added once, after the sum. Arguments as for `ColumnParallelLinear`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        features: tuple[int, int],
        init: Init,
        bias: bool,
        group: Group,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.group = group
        given, made = features
        self.declare("weight", ParameterSpec((made, given), init, Split(1)), group.size, device, dtype)
        if bias:
            spec = ParameterSpec((made,), Constant(0.0), decay=False)
            self.declare("bias", spec, group.size, device, dtype)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """This rank's part (.., i/t) of the input to the whole output (.., o), equal on all ranks."""
        y: Tensor = _SummedLinear.apply(x, self.weight, self.bias, self.group)  # type: ignore[no-untyped-call]
        return y


class _SummedLinear(Function):
    """The sum of x W^T over `group` (g of Megatron-LM's figure 3) + b; backward needs nobody."""

    @staticmethod
    def forward(ctx: _LinearContext, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = linear(x, weight)
        group.all_reduce(y, label="tensor-forward")
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: _LinearContext, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        dx = input_gradient(rows, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        dweight = weight_gradient(rows, x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return dx, dweight, rows.sum(0) if ctx.needs_input_grad[2] else None, None


def _require_in_vocabulary(valid: Tensor, tokens: Tensor, vocabulary: int) -> None:
    """Refuse tokens where `valid` is False: each rank would take them for another rank's and count them as zeros."""
    if tokens.is_cuda:
        torch._assert_async(valid.all(), f"a token is outside the vocabulary of {vocabulary}")  # without waiting for it
    elif not tokens.is_meta and not valid.all():
        wrong = int(tokens[~valid][0])
        raise ValueError(
            f"token {wrong} is outside the vocabulary of {vocabulary}; tokens go from 0 to {vocabulary - 1}"
        )


class VocabularyEmbedding(Described):
    """An embedding table (V, h) with its rows cut over the group; each rank looks up the tokens it holds."""

    weight: nn.Parameter

    def __init__(
        self, vocabulary: int, hidden: int, init: Init, group: Group, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.group = group
        self.vocabulary = vocabulary
        self.declare("weight", ParameterSpec((vocabulary, hidden), init, Split(0)), group.size, device, dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers (..) to vectors (.., h), equal on all ranks.

        Raises:
            ValueError: a token is not in [0, V); on a GPU this is a device-side assertion.
        """
        _require_in_vocabulary((tokens >= 0) & (tokens < self.vocabulary), tokens, self.vocabulary)
        held = self.weight.shape[0]
        local = tokens - self.group.index * held
        elsewhere = (local < 0) | (local >= held)
        vectors = F.embedding(local.masked_fill_(elsewhere, 0), self.weight)
        return sum_over_group(vectors.masked_fill_(elsewhere.unsqueeze(-1), 0), self.group)


def vocabulary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: Group,
    vocabulary: int,
    ignore: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of each token from logits that are cut over the vocabulary; `F.cross_entropy(reduction="none")`.

    Args:
        logits: this rank's (b, s, V/t), float; columns past the true vocabulary are padding.
        targets: (b, s) int64, true token numbers, equal on all ranks.
        group: the tensor group.
        vocabulary: the true V.
        ignore: the target of tokens that have no loss.
        label_smoothing: the part of the target that is spread evenly over the V true tokens.

    Returns:
        (b, s) losses in nats, 0 where ignored; float64 for float64 logits, else float32.

    Raises:
        ValueError: a target is neither `ignore` nor in [0, V); on a GPU this is a device-side assertion.
    """
    valid = ((targets >= 0) & (targets < vocabulary)) | (targets == ignore)
    _require_in_vocabulary(valid, targets, vocabulary)
    cut = _Vocabulary(group, vocabulary, ignore, label_smoothing)
    losses: Tensor = _VocabularyCrossEntropy.apply(logits, targets, cut)  # type: ignore[no-untyped-call]
    return losses


@dataclass(frozen=True)
class _Vocabulary:
    """How the loss is meant, and where this rank's columns lie."""

    group: Group
    size: int
    ignore: int
    smoothing: float

    def held(self, width: int) -> int:
        """How many of this rank's `width` columns are true ones."""
        return min(max(self.size - self.group.index * width, 0), width)

    def place(self, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The targets' columns here, (b, s, 1), and which of them are meant: the others stand at column 0."""
        local = (targets - self.group.index * width).unsqueeze(-1)
        elsewhere = (local < 0) | (local >= width) | (targets == self.ignore).unsqueeze(-1)
        return local.masked_fill_(elsewhere, 0), ~elsewhere


class _LossContext(FunctionCtx):
    """What the loss remembers from forward to backward."""

    cut: _Vocabulary
    dtype: torch.dtype
    saved_tensors: tuple[Tensor, ...]


class _VocabularyCrossEntropy(Function):
    """The loss of one token with target y, and its gradient.

        loss = log Z - (1 - e) (z_y - max) - e/V sum_j (z_j - max)            z its logits, e the smoothing,
        dloss/dz_j = (exp(z_j - max) - Z ((1 - e) [j = y] + e/V)) / Z         Z = sum_j exp(z_j - max)

    One array as large as the logits is kept, the exponentials, and it becomes the gradient.
    """

    @staticmethod
    def forward(ctx: _LossContext, logits: Tensor, targets: Tensor, cut: _Vocabulary) -> Tensor:
        width = logits.shape[-1]
        held = cut.held(width)
        accurate = torch.promote_types(logits.dtype, torch.float32)

        peak = logits.new_full((*targets.shape, 1), -torch.inf, dtype=accurate)
        if held:  # a rank may hold nothing but padding
            peak.copy_(logits[..., :held].amax(-1, keepdim=True))
        cut.group.all_reduce(peak, label="loss", reduction=Reduction.MAX)

        shifted = logits - peak  # promotes to `accurate` in the same pass
        column, here = cut.place(targets, width)
        sums = [shifted.gather(-1, column).masked_fill_(~here, 0)]
        if cut.smoothing:
            sums.append(shifted[..., :held].sum(-1, keepdim=True))
        exponentials = shifted.exp_()
        exponentials[..., held:] = 0
        sums.append(exponentials.sum(-1, keepdim=True))
        stacked = torch.stack(sums)
        cut.group.all_reduce(stacked, label="loss")

        total = stacked[-1]
        losses = total.log() - (1 - cut.smoothing) * stacked[0]
        if cut.smoothing:
            losses -= cut.smoothing / cut.size * stacked[1]
        ctx.cut, ctx.dtype = cut, logits.dtype
        ctx.save_for_backward(exponentials, total, targets)
        return losses.squeeze(-1).masked_fill_(targets == cut.ignore, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: _LossContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        exponentials, total, targets = ctx.saved_tensors
        cut = ctx.cut
        width = exponentials.shape[-1]
        # In place: autograd refuses a second backward pass through what was changed here, so nothing goes wrong unseen.
        column, here = cut.place(targets, width)
        exponentials.scatter_add_(-1, column, total.mul(cut.smoothing - 1).masked_fill_(~here, 0))
        if cut.smoothing:
            exponentials[..., : cut.held(width)] -= total * (cut.smoothing / cut.size)
        factor = gradient.masked_fill(targets == cut.ignore, 0).unsqueeze(-1) / total
        # Written once, in the logits' dtype: into the same memory if it is the same.
        out = exponentials if ctx.dtype == exponentials.dtype else torch.empty_like(exponentials, dtype=ctx.dtype)
        return torch.mul(exponentials, factor, out=out), None, None
