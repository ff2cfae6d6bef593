"""GPT-2 as a list of layers that take a tensor group: an embedding, L blocks, a head.

Every layer is `layer(x, batch) -> x`, so a stage of the pipeline is any run of them. Nothing here knows about stages,
data parallelism or ZeRO, and one process is the group of one rank.

    tokens ─ Embedding ─┬─────────────── x ───────────────┬─ + ─┬────────────── x ──────────────┬─ + ─ ... ─ Head
                        └ norm ─1─ qkv ─ heads ─ output ─2┘     └ norm ─1─ up ─ gelu ─ down ─2──┘   sum of losses

At 1 a column-parallel matrix is entered: backward sums dx over the tensor group. At 2 a row-parallel one is left:
forward sums y. So a block makes four all-reduces per micro-batch, two forward and two backward (Megatron-LM; Shoeybi et
al., 2019, section 3). Dropout follows each 2, the embedding and the softmax of the heads.

Architecture and initial values are GPT-2's (Radford et al., 2019): pre-norm, learned positions, GELU (tanh),
normal(0.02), and the matrices that write into the residual stream scaled by 1/sqrt(2L).
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor, nn

from meshwright.comm.collectives import gather_last_dim
from meshwright.comm.group import Group
from meshwright.costs.spec import GPTSpec
from meshwright.layout.nearest import nearest_divisors, one_of
from meshwright.model.activation import Gelu
from meshwright.model.batch import IGNORED, MicroBatch
from meshwright.parallel.attention import causal_attention
from meshwright.parallel.noise import Dropout, Noise
from meshwright.parallel.normed import LayerNorm, normed_linear
from meshwright.parallel.parameter import (
    Described,
    DescribedParameter,
    Normal,
    ParameterSpec,
    described,
)
from meshwright.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from meshwright.parallel.vocabulary import Vocabulary, VocabularyEmbedding, vocabulary_loss
from meshwright.schedule.cut import Tie

TIED = "embedding.token.weight"
"""Global name of the matrix that a tied model uses twice: to embed tokens and to predict them."""

_NORMAL = Normal(0.02)


class PositionEmbedding(Described):
    """One learned vector per position, whole on every rank of the tensor group."""

    weight: nn.Parameter

    def __init__(self, sequence: int, hidden: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.declare("weight", ParameterSpec((sequence, hidden), _NORMAL), 1, device, dtype)

    def forward(self, length: int) -> Tensor:
        """The vectors of the first `length` positions, (length, h)."""
        if length > self.weight.shape[0]:
            raise ValueError(f"{length} tokens in a sequence, but the model has {self.weight.shape[0]} positions")
        return self.weight[:length]


class Embedding(nn.Module):
    """Tokens to vectors, and their positions."""

    def __init__(self, spec: GPTSpec, tensor: Group, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.token = VocabularyEmbedding(spec.vocabulary, spec.hidden, _NORMAL, tensor, device, dtype)
        self.position = PositionEmbedding(spec.sequence, spec.hidden, device, dtype)
        self.dropout = Dropout(spec.dropout, "embedding")

    def forward(self, tokens: Tensor, batch: MicroBatch) -> Tensor:
        """(b, s) int64 to (b, s, h)."""
        x = self.token(tokens) + self.position(tokens.shape[1])
        return self.dropout(x, batch.noise)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal self-attention; this rank computes a/t of the a heads, which lie together in its shard of qkv."""

    def __init__(self, spec: GPTSpec, number: int, tensor: Group, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        if spec.heads % tensor.size:
            raise ValueError(
                f"tp={tensor.size} does not divide {spec.heads} heads; "
                f"try {one_of(nearest_divisors(spec.heads, tensor.size))}"
            )
        local = spec.heads // tensor.size
        self.heads = tuple(range(tensor.index * local, (tensor.index + 1) * local))
        self.head_size = spec.head_size
        h = spec.hidden
        self.qkv = ColumnParallelLinear((h, 3 * h), _NORMAL, spec.bias, tensor, device, dtype, blocks=3)
        self.output = RowParallelLinear((h, h), _residual(spec), spec.bias, tensor, device, dtype)
        self.dropout = Dropout(spec.dropout, f"blocks.{number}.attention")

    def forward(self, x: Tensor, norm: LayerNorm, noise: Noise | None) -> Tensor:
        """(b, s, h) to (b, s, h), of what `norm` makes of `x`."""
        b, s, _ = x.shape
        qkv = normed_linear(x, norm, self.qkv).view(b, s, 3, len(self.heads), self.head_size)
        if noise is None or self.dropout.probability == 0:
            y = causal_attention(qkv)
        else:
            y = self._attend_with_dropout(qkv, noise)
        return self.output(y.reshape(b, s, len(self.heads) * self.head_size))  # type: ignore[no-any-return]

    def _attend_with_dropout(self, qkv: Tensor, noise: Noise) -> Tensor:
        """The same, written out, so that the mask can depend on sample and head and not on torch's random state."""
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        s = q.shape[2]
        future = torch.ones(s, s, dtype=torch.bool, device=q.device).triu_(1)
        scores = (q * self.head_size**-0.5).matmul(k.transpose(-2, -1)).masked_fill_(future, -torch.inf)
        return self.dropout(scores.softmax(-1), noise, self.heads).matmul(v).transpose(1, 2)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two matrices around a GELU; this rank computes 4h/t of the features between them."""

    def __init__(self, spec: GPTSpec, tensor: Group, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        h = spec.hidden
        self.up = ColumnParallelLinear((h, 4 * h), _NORMAL, spec.bias, tensor, device, dtype)
        self.down = RowParallelLinear((4 * h, h), _residual(spec), spec.bias, tensor, device, dtype, Gelu())

    def forward(self, x: Tensor, norm: LayerNorm) -> Tensor:
        """(b, s, h) to (b, s, h), of what `norm` makes of `x`."""
        return self.down(normed_linear(x, norm, self.up))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One Transformer layer; `number` counts from 0 and names it in the model."""

    def __init__(self, spec: GPTSpec, number: int, tensor: Group, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = LayerNorm(spec.hidden, spec.bias, device, dtype)
        self.attention = Attention(spec, number, tensor, device, dtype)
        self.attention_dropout = Dropout(spec.dropout, f"blocks.{number}.attention.output")
        self.norm2 = LayerNorm(spec.hidden, spec.bias, device, dtype)
        self.mlp = MLP(spec, tensor, device, dtype)
        self.mlp_dropout = Dropout(spec.dropout, f"blocks.{number}.mlp")

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """(b, s, h) to (b, s, h)."""
        x = x + self.attention_dropout(self.attention(x, self.norm1, batch.noise), batch.noise)
        return x + self.mlp_dropout(self.mlp(x, self.norm2), batch.noise)  # type: ignore[no-any-return]


class Head(nn.Module):
    """The last norm, the projection onto the vocabulary, and the loss."""

    def __init__(self, spec: GPTSpec, tensor: Group, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.group = tensor
        self.vocabulary = spec.vocabulary
        self.norm = LayerNorm(spec.hidden, spec.bias, device, dtype)
        self.projection = ColumnParallelLinear((spec.hidden, spec.vocabulary), _NORMAL, False, tensor, device, dtype)

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """(b, s, h) to the *sum* of the tokens' losses in nats, a scalar (float32, or float64 for a float64 model).

        Whoever knows the token count of the whole batch divides by it, so micro-batches may differ in size.
        """
        vocabulary = Vocabulary(self.group, self.vocabulary, IGNORED, batch.label_smoothing)
        return vocabulary_loss(self.norm(x), self.projection.weight, batch.targets, vocabulary).sum()

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """(b, s, h) to (b, s, V), whole on every rank, to sample from; no gradient."""
        return gather_last_dim(self.projection(self.norm(x)), self.group)[..., : self.vocabulary]


def _residual(spec: GPTSpec) -> Normal:
    """Initial values of the 2L matrices that write into the residual stream: their sum keeps the scale of one."""
    return Normal(_NORMAL.std / sqrt(2 * spec.layers))


def layer_names(spec: GPTSpec) -> tuple[str, ...]:
    """The L + 2 layers by name: "embedding", "blocks.0", ..., "head"."""
    return ("embedding", *(f"blocks.{number}" for number in range(spec.layers)), "head")


def build_layer(
    spec: GPTSpec, index: int, tensor: Group, device: torch.device, dtype: torch.dtype
) -> Embedding | Block | Head:
    """Layer `index` of the L + 2, this rank's shard of it; parameters have shapes, their values are not set.

    Raises:
        ValueError: the tensor group's size does not divide the heads.
    """
    assert 0 <= index <= spec.layers + 1, f"layer {index} of {spec.layers + 2}"
    if index == 0:
        return Embedding(spec, tensor, device, dtype)
    if index == spec.layers + 1:
        return Head(spec, tensor, device, dtype)
    return Block(spec, index - 1, tensor, device, dtype)


def ties(spec: GPTSpec) -> tuple[Tie, ...]:
    """The parameters that several layers use."""
    return (Tie("tied", (0, spec.layers + 1)),) if spec.tied else ()


def parameters_of(spec: GPTSpec, index: int, layer: nn.Module) -> tuple[DescribedParameter, ...]:
    """Every parameter that layer `index` reads, under its global name; a tied projection is `TIED`."""
    name = layer_names(spec)[index]
    names = {"head.projection.weight": TIED} if spec.tied else {}
    return tuple(replace(entry, name=names.get(entry.name, entry.name)) for entry in described(layer, name))
