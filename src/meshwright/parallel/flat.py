"""How the parameters of a unit lie in its flat buffer.

      whole │ decayed: split, replicated ... │ undecayed: split, replicated ... │ pad │

Decayed before undecayed, so that an optimizer with and without weight decay sees two runs; within each, parameters
cut by tensor parallelism before those that every tensor rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.parallel.parameter import DescribedParameter, ParameterSpec


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat buffer, and the modules that read it there (several if it is tied)."""

    name: str
    spec: ParameterSpec
    shape: tuple[int, ...]
    start: int
    places: tuple[tuple[nn.Module, str], ...]

    @property
    def numel(self) -> int:
        """Elements of the local (tensor-parallel) shape."""
        return torch.Size(self.shape).numel()

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.numel

    @property
    def replicated(self) -> bool:
        """Whether every rank of the tensor axis holds the same elements."""
        return self.spec.split is None


@dataclass(frozen=True)
class Piece:
    """A run of owned elements that the optimizer treats alike: values, gradient, and whether they decay."""

    value: Tensor
    gradient: Tensor
    decay: bool


def lay_out(parameters: Sequence[DescribedParameter], tensor_size: int) -> tuple[Slot, ...]:
    """Places in the flat buffer: decayed before undecayed, and within each the split before the replicated."""
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for parameter in parameters:
        places.setdefault(parameter.name, []).append((parameter.owner, parameter.attribute))
    unique = {parameter.name: parameter.spec for parameter in parameters}
    slots: list[Slot] = []
    start = 0
    for name, spec in sorted(unique.items(), key=lambda item: (not item[1].decay, item[1].split is None)):
        slots.append(Slot(name, spec, spec.local_shape(tensor_size), start, tuple(places[name])))
        start = slots[-1].stop
    return tuple(slots)


def padded_numel(parameters: Sequence[DescribedParameter], shards: int, tensor_size: int) -> int:
    """Elements of the unit that these parameters make, padded so that `shards` ranks can cut it evenly."""
    slots = lay_out(parameters, tensor_size)
    return -(-slots[-1].stop // shards) * shards if slots else 0
