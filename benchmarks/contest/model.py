"""The rivals' GPT: what anybody would write in plain torch, with the same parameters as ours under the same names.

Not a copy of `meshwright.model`: no groups, no units, torch's own layers and loss. It starts from the same values, so
that all systems can be seen to learn the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.comm.group import SoloGroup
from meshwright.costs.spec import GPTSpec
from meshwright.model.gpt import build_layer, parameters_of
from meshwright.parallel.parameter import initial_value


class Embedding(nn.Module):
    """Tokens to vectors, and their positions."""

    def __init__(self, spec: GPTSpec) -> None:
        super().__init__()
        self.token = nn.Embedding(spec.vocabulary, spec.hidden)
        self.position = nn.Embedding(spec.sequence, spec.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """(b, s) to (b, s, h)."""
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal self-attention with one matrix for queries, keys and values."""

    def __init__(self, spec: GPTSpec) -> None:
        super().__init__()
        self.heads = spec.heads
        self.qkv = nn.Linear(spec.hidden, 3 * spec.hidden)
        self.output = nn.Linear(spec.hidden, spec.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) to (b, s, h)."""
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two matrices around a GELU."""

    def __init__(self, spec: GPTSpec) -> None:
        super().__init__()
        self.up = nn.Linear(spec.hidden, 4 * spec.hidden)
        self.down = nn.Linear(4 * spec.hidden, spec.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) to (b, s, h)."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One Transformer layer."""

    def __init__(self, spec: GPTSpec) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(spec.hidden)
        self.attention = Attention(spec)
        self.norm2 = nn.LayerNorm(spec.hidden)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) to (b, s, h)."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Head(nn.Module):
    """The last norm and the projection onto the vocabulary."""

    def __init__(self, spec: GPTSpec) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(spec.hidden)
        self.projection = nn.Linear(spec.hidden, spec.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) to (b, s, V)."""
        return self.projection(self.norm(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """The whole model, from tokens to the mean loss of a token; the loss is taken in float32."""

    def __init__(self, spec: GPTSpec) -> None:
        super().__init__()
        self.embedding = Embedding(spec)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.head = Head(spec)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """(b, s) both, to a scalar."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def initialised(spec: GPTSpec, seed: int) -> GPT:
    """The model with the values that ours has for this seed."""
    with torch.device("meta"):
        model = GPT(spec)
    model.to_empty(device="cpu")
    alone, meta = SoloGroup("tensor"), torch.device("meta")
    specs = {
        entry.name: entry.spec
        for index in range(spec.layers + 2)
        for entry in parameters_of(spec, index, build_layer(spec, index, alone, meta, torch.float32))
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(specs[name], name, seed))
    return model
