"""Modules that nobody wrote for us, with everything that real ones have and that has broken other systems."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    """A residual layer whose sizes nothing divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 13)
        self.down = nn.Linear(13, width)
        self.scale = nn.Parameter(torch.tensor(0.7))  # no dims
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x)))) + self.nothing.sum()


class Adapter(nn.Module):
    """A low-rank correction that computes in its own dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(width, 2, bias=False)
        self.b = nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x.to(self.a.weight.dtype))).to(x.dtype)
        return y


class Model(nn.Module):
    """Tokens to logits: tied ends, layers, a branch that few samples take, one that none does, a frozen layer.

    Returns an ordered dict, as Hugging Face's models do, and names its layers as they do.
    """

    _no_split_modules = ("Layer",)

    def __init__(self, vocabulary: int = 11, width: int = 7, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.adapter = Adapter(width)
        self.rare = Layer(width)
        self.never = Layer(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[1].requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> OrderedDict[str, Tensor]:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        x = x + self.adapter(x)
        if bool((tokens == 0).any()):  # not on every rank
            x = self.rare(x)
        return OrderedDict(logits=self.head(x), hidden=x)


class Residual(nn.Module):
    """Two convolutions with BatchNorm around a shortcut; the activation works in place."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(given, made, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(made)
        self.two = nn.Conv2d(made, made, 3, padding=1)
        self.short = nn.Conv2d(given, made, 1) if given != made else nn.Identity()
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.activation(self.norm(self.one(x))))
        y += self.short(x)
        return self.activation(y)


def cnn() -> nn.Sequential:
    """A small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1),
        Residual(5, 5),
        Residual(5, 6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


# --- a zoo: each with something that has broken other systems -------------------------------------------------------


class Twice(nn.Module):
    """One module called twice in a row, one parameter under two names, a list of parameters, one nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(6)
        self.alias = self.layer
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(6)) for _ in range(2))
        self.same = self.scales[0]
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.alias(self.layer(x)) * self.scales[0]
        y: Tensor = self.head(self.layer(x) * self.scales[1] + self.same)
        return y


class Outer(nn.Module):
    """A block with a parameter of its own around blocks; it reads what an inner one has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.bias = nn.Parameter(torch.rand(6))
        self.tied = self.inner[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for inner in self.inner:
            x = torch.tanh(inner(x)) + self.bias
        return x @ self.tied


class Nested(nn.Module):
    """Two dtypes in one block, a frozen one beside a trained one, blocks inside blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(Outer(), Outer())
        self.single = nn.Linear(6, 4).float()
        self.frozen = nn.Linear(6, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.outer(x)
        y: Tensor = self.single(x.to(self.single.weight.dtype)).to(x.dtype) * self.frozen(x)
        return y


class Recurrent(nn.Module):
    """Modules that read the parameters of those inside them, and parametrized ones."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(5, 1, 7, dropout=0.0, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(x[:, None] + torch.arange(3, device=x.device)[:, None])
        x, _ = self.attention(x, x, x)
        y: Tensor = self.normed(self.encoder(x).mean(1))
        return y


@dataclass
class Result:
    """What some modules return; `more` is not looked at by pytree."""

    value: Tensor
    more: dict[str, Any]


class Boxed(nn.Module):
    """Takes keywords and returns an object."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, *, given: tuple[Tensor, dict[str, Tensor]]) -> Result:
        x = torch.tanh(self.first(given[0]))
        return Result(x, {"deep": [self.second(given[1]["x"] + x)], "flag": True})


class Boxes(nn.Module):
    """Blocks that exchange tuples, dicts and dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Boxed(), Boxed()

    def forward(self, x: Tensor) -> Tensor:
        result = self.one(given=(x, {"x": x}))
        deep: Tensor = result.more["deep"][0]
        last: Tensor = self.two(given=(result.value, {"x": deep})).more["deep"][0]
        return last


class Checkpointed(nn.Module):
    """Recomputes single blocks and runs of blocks."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Layer(6) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers[:2]:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        pair = checkpoint(lambda y: self.layers[3](self.layers[2](y)), x, use_reentrant=self.reentrant)
        again: Tensor = checkpoint(self.layers[0], pair, use_reentrant=self.reentrant)
        return again


class Experts(nn.Module):
    """A loss beside the output, through an attribute; blocks in another order than they were registered."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(Gate() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for gate in reversed(self.gates):
            x = gate(x)
        return x + sum(gate.extra for gate in self.gates)


class Gate(nn.Module):
    """A mixture of two."""

    def __init__(self) -> None:
        super().__init__()
        self.choose, self.one, self.two = nn.Linear(6, 2), nn.Linear(6, 6), nn.Linear(6, 6)
        self.extra = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        weights = self.choose(x).softmax(-1)
        self.extra = weights.square().mean()
        return weights[:, :1] * self.one(x) + weights[:, 1:] * self.two(x)


class Energy(nn.Module):
    """Moves against the gradient of an energy that it computes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(6, 6)
        self.well = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            force = torch.autograd.grad(self.well(place).square().sum(), place)[0]
        y: Tensor = self.shift(x - 0.1 * force)
        return y


ZOO: dict[str, Callable[[], nn.Module]] = {
    "twice": Twice,
    "nested": Nested,
    "recurrent": Recurrent,
    "boxes": Boxes,
    "recomputed": lambda: Checkpointed(False),
    "reentrant": lambda: Checkpointed(True),
    "experts": Experts,
    "energy": Energy,
    "transformer": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(6, 2, 7, dropout=0.0, batch_first=True), 3, enable_nested_tensor=False
    ),
}
"""Modules that take 4 x 6 numbers."""
