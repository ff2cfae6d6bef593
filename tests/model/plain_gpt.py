"""A GPT-2 written with nothing but torch's own modules, to hold the parallel one against, and how to fill both alike.

Its submodules are named so that its parameters carry the global names of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.comm.group import Group
from meshwright.costs.spec import GPTSpec
from meshwright.model.gpt import build_layer, parameters_of
from meshwright.parallel.noise import Noise
from meshwright.parallel.parameter import Constant, Normal, ParameterSpec, cut, initial_value

CPU = torch.device("cpu")
Drop = Callable[[Tensor, str, bool], Tensor]
"""What to do to activations (b, ...), or attention weights (b, heads, s, s) where the flag is set, at a named site."""


def keep_all(x: Tensor, site: str, by_head: bool) -> Tensor:
    return x


def drop_with(noise: Noise, probability: float) -> Drop:
    """Dropout from the same masks, multiplied in float and over all heads at once."""

    def drop(x: Tensor, site: str, by_head: bool) -> Tensor:
        heads = tuple(range(x.shape[1])) if by_head else None
        mask = noise.keep_mask(site, probability, x.shape[2:] if by_head else x.shape[1:], x.device, heads)
        return x * mask.to(x.dtype) / (1 - probability)

    return drop


class PlainBlock(nn.Module):
    def __init__(self, spec: GPTSpec, name: str) -> None:
        super().__init__()
        h, bias = spec.hidden, spec.bias
        self.name, self.heads = name, spec.heads
        self.norm1 = nn.LayerNorm(h, bias=bias, dtype=torch.float64)
        self.norm2 = nn.LayerNorm(h, bias=bias, dtype=torch.float64)
        self.attention = nn.ModuleDict(
            {
                "qkv": nn.Linear(h, 3 * h, bias, dtype=torch.float64),
                "output": nn.Linear(h, h, bias, dtype=torch.float64),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "up": nn.Linear(h, 4 * h, bias, dtype=torch.float64),
                "down": nn.Linear(4 * h, h, bias, dtype=torch.float64),
            }
        )

    def forward(self, x: Tensor, drop: Drop) -> Tensor:
        s, h = x.shape[1:]
        q, k, v = self.attention["qkv"](self.norm1(x)).split(h, -1)
        size = h // self.heads
        outputs = []
        for i, n in product(range(x.shape[0]), range(self.heads)):
            columns = slice(n * size, (n + 1) * size)
            scores = q[i, :, columns] @ k[i, :, columns].T / size**0.5
            outputs.append(scores + torch.full((s, s), -torch.inf, dtype=x.dtype).triu(1))
        weights = torch.stack(outputs).view(x.shape[0], self.heads, s, s).softmax(-1)
        weights = drop(weights, f"{self.name}.attention", True)
        y = torch.einsum("bnst,btnd->bsnd", weights, v.unflatten(-1, (self.heads, size))).flatten(-2)
        x = x + drop(self.attention["output"](y), f"{self.name}.attention.output", False)
        inner = F.gelu(self.mlp["up"](self.norm2(x)), approximate="tanh")
        return x + drop(self.mlp["down"](inner), f"{self.name}.mlp", False)


class PlainGPT(nn.Module):
    def __init__(self, spec: GPTSpec) -> None:
        super().__init__()
        h, double = spec.hidden, torch.float64
        self.embedding = nn.ModuleDict(
            {
                "token": nn.Embedding(spec.vocabulary, h, dtype=double),
                "position": nn.Embedding(spec.sequence, h, dtype=double),
            }
        )
        self.blocks = nn.ModuleList(PlainBlock(spec, f"blocks.{number}") for number in range(spec.layers))
        self.head = nn.ModuleDict(
            {
                "norm": nn.LayerNorm(h, bias=spec.bias, dtype=double),
                "projection": nn.Linear(h, spec.vocabulary, bias=False, dtype=double),
            }
        )
        if spec.tied:
            self.head["projection"].weight = self.embedding["token"].weight

    def load(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.named_parameters():
            parameter.data.copy_(values[name])

    def logits(self, tokens: Tensor, drop: Drop = keep_all) -> Tensor:
        positions = torch.arange(tokens.shape[1])
        x = drop(self.embedding["token"](tokens) + self.embedding["position"](positions), "embedding", False)
        for block in self.blocks:
            x = block(x, drop)
        return self.head["projection"](self.head["norm"](x))

    def loss_sum(self, tokens: Tensor, targets: Tensor, drop: Drop = keep_all) -> Tensor:
        logits = self.logits(tokens, drop)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def value_of(name: str, spec: ParameterSpec) -> Tensor:
    """Values for a comparison: nothing is 0 or 1 by construction, so that no bias and no norm can be forgotten."""
    centre = spec.init.value if isinstance(spec.init, Constant) else 0.0
    return initial_value(replace(spec, init=Normal(0.3)), name, seed=3).double() + centre


def build_filled(
    spec: GPTSpec, indices: Sequence[int], group: Group
) -> tuple[list[nn.Module], dict[str, ParameterSpec]]:
    """The layers at `indices` in float64, filled with this rank's shards of `value_of`; the specs by global name."""
    layers, specs = [], {}
    parameters: dict[str, nn.Parameter] = {}
    for index in indices:
        layer = build_layer(spec, index, group, CPU, torch.float64)
        for entry in parameters_of(spec, index, layer):
            if entry.name not in parameters:
                whole = value_of(entry.name, entry.spec)
                parameters[entry.name] = nn.Parameter(cut(whole, entry.spec, group.index, group.size).clone())
                specs[entry.name] = entry.spec
            entry.owner.register_parameter(entry.attribute, parameters[entry.name])
        layers.append(layer)
    return layers, specs


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def drawn_tokens(spec: GPTSpec, samples: int, seed: int = 0) -> Tensor:
    shape = (samples, spec.sequence)
    return torch.randint(spec.vocabulary, shape, generator=torch.Generator().manual_seed(seed))
