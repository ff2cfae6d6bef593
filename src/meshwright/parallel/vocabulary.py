"""Where tokens meet the vocabulary, whose rows are cut over the tensor group: embedding, and projection with loss.

Megatron-LM (Shoeybi et al., 2019), section 3; t is the size of the tensor group:

    tokens ──► VocabularyEmbedding ──► x (.., h)             x (.., h) ──► vocabulary_loss ──► losses (..)
               forward: a sum                                forward: a maximum and two or three sums of b s numbers
               backward: nothing                             backward: a sum of dx

A vocabulary that t does not divide is padded at its end: the padding takes no part in the loss and gets a gradient of
exactly zero. A rank may hold nothing but padding. Batches may be empty.

Projection and loss are one function because the logits are the largest array of a small model, and nobody needs them
whole: a block of `BLOCK` tokens of them is made in float32, and what stays is one array (b s, V/t) in the dtype of the
computation, which becomes their gradient (constant-size buffers; ZeRO, section 6.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx, once_differentiable

from meshwright.comm.collectives import sum_over_group
from meshwright.comm.group import Group, Reduction
from meshwright.parallel.parameter import Described, Init, ParameterSpec, Split
from meshwright.parallel.product import input_gradient, leave_weight_gradient, linear

BLOCK = 128
"""Tokens whose logits exist in float32 at a time: enough for a product of matrices at full speed."""

GPU_BLOCK = 4096
"""The same on a GPU, which needs more work at a time."""


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary cut over a group, and how a loss over it is meant.

    Args:
        group: the tensor group.
        size: the true V.
        ignore: the target of tokens that have no loss.
        smoothing: the part e of the target that is spread evenly over the V true tokens.
    """

    group: Group
    size: int
    ignore: int = -100
    smoothing: float = 0.0

    def held(self, width: int) -> int:
        """How many of this rank's `width` rows are true ones."""
        return min(max(self.size - self.group.index * width, 0), width)

    def place(self, tokens: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The tokens' rows here, in the shape of `tokens`, and which of them lie here: the others stand at row 0."""
        local = tokens - self.group.index * width
        here = (local >= 0) & (local < width) & (tokens != self.ignore)
        return local.masked_fill_(~here, 0), here

    def require(self, valid: Tensor, tokens: Tensor) -> None:
        """Refuse `tokens` that are not `valid`: each rank would take them for another rank's and count them as zeros.

        Raises:
            ValueError: naming the first; on a GPU this is a device-side assertion, so that nobody has to wait for it.
        """
        if tokens.is_cuda:
            torch._assert_async(valid.all(), f"a token is outside the vocabulary of {self.size}")
        elif not tokens.is_meta and not valid.all():
            wrong = int(tokens[~valid][0])
            raise ValueError(
                f"token {wrong} is outside the vocabulary of {self.size}; tokens go from 0 to {self.size - 1}"
            )


class VocabularyEmbedding(Described):
    """An embedding table (V, h) with its rows cut over the group; each rank looks up the tokens it holds."""

    weight: nn.Parameter

    def __init__(
        self, vocabulary: int, hidden: int, init: Init, group: Group, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.group = group
        self.vocabulary = Vocabulary(group, vocabulary)
        self.declare("weight", ParameterSpec((vocabulary, hidden), init, Split(0)), group.size, device, dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers (..) to vectors (.., h), equal on all ranks.

        Raises:
            ValueError: a token is not in [0, V); on a GPU this is a device-side assertion.
        """
        self.vocabulary.require((tokens >= 0) & (tokens < self.vocabulary.size), tokens)
        row, here = self.vocabulary.place(tokens, self.weight.shape[0])
        vectors = F.embedding(row, self.weight)
        return sum_over_group(vectors.masked_fill_(~here.unsqueeze(-1), 0), self.group)


def vocabulary_loss(x: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
    """`F.cross_entropy(F.linear(x, weight), targets, reduction="none")` over a vocabulary that is cut.

    Args:
        x: (.., h), equal on all ranks; its gradient is summed over the group.
        weight: this rank's rows (V/t, h); its gradient goes where `leave_weight_gradient` says.
        targets: (..) int64, true token numbers, equal on all ranks.
        vocabulary: the true one, and what of the targets counts.

    Returns:
        (..) losses in nats, 0 where ignored; float64 for float64, else float32. They can be differentiated once.

    Raises:
        ValueError: a target is neither `ignore` nor in [0, V); on a GPU this is a device-side assertion.
    """
    valid = ((targets >= 0) & (targets < vocabulary.size)) | (targets == vocabulary.ignore)
    vocabulary.require(valid, targets)
    graph = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    losses: Tensor = _VocabularyLoss.apply(x, weight, targets, vocabulary, graph)  # type: ignore[no-untyped-call]
    return losses


class _LossContext(FunctionCtx):
    """What the loss remembers from forward to backward."""

    vocabulary: Vocabulary
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _VocabularyLoss(Function):
    """The loss of one token with target y, and its gradient, from what each rank knows of its own columns.

        q_j = exp(z_j - m) / S                   over this rank's columns: m their maximum, S the sum of exp(z - m)
        Z   = sum over ranks of S exp(m - M)     M the maximum of all; S exp(m - M) / Z is the share of this rank
        loss       = log Z - (1 - e) (z_y - M) - e/V sum_j (z_j - M)              z the logits, e the smoothing,
        dloss/dz_j = q_j share - (1 - e) [j = y] - e/V                            j all true columns

    Logits meet only as differences from a maximum, so huge ones lose nothing.
    """

    @staticmethod
    def forward(
        ctx: _LossContext, x: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary, graph: bool
    ) -> Tensor:
        rows = x.flatten(0, -2)
        local = _LocalSoftmax(rows, weight, targets.reshape(-1, 1), vocabulary, graph)

        peak = local.peak.clone()
        vocabulary.group.all_reduce(peak, label="loss", reduction=Reduction.MAX)
        shift = local.peak - peak
        own = local.sum * shift.exp()
        sums = torch.stack([own, (local.target + shift).masked_fill_(~local.here, 0)])
        if vocabulary.smoothing:
            sums = torch.cat([sums, (local.total + local.held * shift).unsqueeze(0)])
        vocabulary.group.all_reduce(sums, label="loss")

        losses = sums[0].log() - (1 - vocabulary.smoothing) * sums[1]
        if vocabulary.smoothing:
            losses -= vocabulary.smoothing / vocabulary.size * sums[2]
        if local.softmax is not None:
            ctx.vocabulary = vocabulary
            ctx.save_for_backward(x, weight, targets, local.softmax, own / sums[0], sums[1].exp() / sums[0])
        return losses.view(targets.shape).masked_fill_(targets == vocabulary.ignore, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: _LossContext, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, targets, softmax, share, likelihood = ctx.saved_tensors
        vocabulary, smoothing = ctx.vocabulary, ctx.vocabulary.smoothing
        targets = targets.reshape(-1, 1)
        factor = gradient.reshape(-1, 1).masked_fill(targets == vocabulary.ignore, 0)
        spread = smoothing / vocabulary.size
        at_target = factor * (likelihood - (1 - smoothing) - spread)  # from what is accurate: q was rounded
        column, here = vocabulary.place(targets, weight.shape[0])
        # In place: autograd refuses a second backward pass through what was changed here, so nothing goes wrong unseen.
        for part in _blocks(softmax):
            wide = softmax[part].to(share.dtype).mul_(factor[part] * share[part])
            if smoothing:
                wide[:, : vocabulary.held(weight.shape[0])] -= factor[part] * spread
            exact = torch.where(here[part], at_target[part], wide.gather(-1, column[part]))
            softmax[part] = wide.scatter_(-1, column[part], exact)
        dx = dweight = handle = None
        if ctx.needs_input_grad[0]:
            dx = input_gradient(softmax, weight).view(x.shape)
            handle = vocabulary.group.start_all_reduce(dx, label="tensor-backward")
        if ctx.needs_input_grad[1]:
            dweight = leave_weight_gradient(weight, softmax, x.flatten(0, -2))
        if handle is not None:
            handle.wait()
        return dx, dweight, None, None, None


class _LocalSoftmax:
    """What a rank finds in its own columns of the logits (n, V/t), a block of tokens at a time; see above for letters.

    Attributes:
        softmax: q (n, V/t) in the dtype of `rows`, 0 in padded columns; None unless it is kept.
        peak: m (n, 1); where there are no true columns, so low that it counts as nothing.
        sum: S (n, 1).
        here: which targets lie in these columns, (n, 1).
        target: z_y - m (n, 1) where it does.
        total: sum of z_j - m (n, 1), if there is smoothing.
        held: the number of true columns.
    """

    def __init__(self, rows: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary, keep: bool) -> None:
        width = weight.shape[0]
        accurate = torch.promote_types(rows.dtype, torch.float32)
        self.held = vocabulary.held(width)
        self.softmax = rows.new_empty((len(rows), width)) if keep else None
        self.peak = rows.new_full((len(rows), 1), torch.finfo(accurate).min, dtype=accurate)
        self.sum, self.target, self.total = torch.zeros((3, *self.peak.shape), dtype=accurate, device=rows.device)
        column, self.here = vocabulary.place(targets, width)
        if self.softmax is not None:
            self.softmax[:, self.held :] = 0
        if not self.held:
            return
        true = weight[: self.held]
        block = rows.new_empty((min(_size(rows), len(rows)), self.held), dtype=accurate)
        for part in _blocks(rows):
            logits = linear(rows[part], true).to(accurate)
            softmax = torch.softmax(logits, -1, out=block[: len(logits)])
            peak = self.peak[part] = logits.amax(-1, keepdim=True)
            self.sum[part] = 1 / softmax.amax(-1, keepdim=True)  # the largest logit's probability is exp(0) / S
            self.target[part] = logits.gather(-1, column[part]) - peak
            if vocabulary.smoothing:
                self.total[part] = logits.sub_(peak).sum(-1, keepdim=True)
            if self.softmax is not None:
                self.softmax[part, : self.held] = softmax
            del logits  # before the next block is made


def _size(rows: Tensor) -> int:
    return GPU_BLOCK if rows.is_cuda else BLOCK


def _blocks(rows: Tensor) -> Iterator[slice]:
    size = _size(rows)
    return (slice(low, min(low + size, len(rows))) for low in range(0, len(rows), size))
