"""How the parameters of a unit lie in its flat buffer.

      whole │ group 0: split, replicated ... │ group 1: split, replicated ... │ pad │

A group is what the optimizer treats alike (the same weight decay, the same learning rate), so that it sees one run for
each; within a group, parameters cut by tensor parallelism come before those that every tensor rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from meshwright.parallel.parameter import DescribedParameter, ParameterSpec


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat buffer, and the modules that read it there (several if it is tied).

    `group` is the number of its optimizer group.
    """

    name: str
    spec: ParameterSpec
    shape: tuple[int, ...]
    start: int
    places: tuple[tuple[nn.Module, str], ...]
    group: int

    @property
    def numel(self) -> int:
        """Elements of the local (tensor-parallel) shape."""
        return torch.Size(self.shape).numel()

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.numel

    def place(self, parameter: nn.Parameter) -> None:
        """Make the modules read `parameter`."""
        for owner, attribute in self.places:
            setattr(owner, attribute, parameter)

    @property
    def replicated(self) -> bool:
        """Whether every rank of the tensor axis holds the same elements."""
        return self.spec.split is None


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of what a rank owns of a unit, all in one optimizer group."""

    start: int
    stop: int
    group: int

    @property
    def part(self) -> slice:
        """The same as a slice."""
        return slice(self.start, self.stop)

    def cut_at(self, borders: Iterable[int]) -> tuple[Run, ...]:
        """The same elements as runs that no border lies inside of."""
        inside = sorted({border for border in borders if self.start < border < self.stop})
        return tuple(Run(low, high, self.group) for low, high in pairwise((self.start, *inside, self.stop)))


def lay_out(parameters: Sequence[DescribedParameter], tensor_size: int) -> tuple[Slot, ...]:
    """Places in the flat buffer: by optimizer group, and within each the split before the replicated."""
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for parameter in parameters:
        places.setdefault(parameter.name, []).append((parameter.owner, parameter.attribute))
    unique = {parameter.name: parameter for parameter in parameters}
    slots: list[Slot] = []
    start = 0
    for name, one in sorted(unique.items(), key=lambda item: (item[1].group, item[1].spec.split is None)):
        shape = one.spec.local_shape(tensor_size)
        slots.append(Slot(name, one.spec, shape, start, tuple(places[name]), one.group))
        start = slots[-1].stop
    return tuple(slots)


def padded_numel(parameters: Sequence[DescribedParameter], shards: int, tensor_size: int) -> int:
    """Elements of the unit that these parameters make, padded so that `shards` ranks can cut it evenly."""
    slots = lay_out(parameters, tensor_size)
    return -(-slots[-1].stop // shards) * shards if slots else 0
