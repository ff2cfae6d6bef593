"""Modules that nobody wrote for us, with everything that real ones have and that has broken other systems."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
