"""Finds where a gradient stopped being finite: the rank and the parameter, the same answer on every rank.

Backward passes go from the last layer to the first and carry an infinity down with them. So it began in the last layer
whose gradient was not finite before it was summed over the ranks, on the rank where it was so; and at the parameter of
that layer whose sum is not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from meshwright.comm.group import Group, Reduction
from meshwright.parallel.unit import Unit

_NAME_BYTES = 256


@dataclass(frozen=True)
class Fault:
    """A step was skipped: the gradient of `parameter` was not finite, first on `rank`."""

    rank: int
    parameter: str

    def __str__(self) -> str:
        return f"the gradient of {self.parameter} is not finite; it began on rank {self.rank}"


def find_fault(units: Mapping[int, Unit], world: Group, device: torch.device) -> Fault:
    """Where it began, after the reductions of a step; every rank must call it.

    `units` are this rank's, by the place of their layers in the forward pass of the whole model.
    """
    here = max((place for place, unit in units.items() if not unit.gradient.finite_here), default=-1)
    places = torch.full((world.size,), -1, dtype=torch.int64, device=device)
    places[world.index] = here
    world.all_reduce(places, label="fault", reduction=Reduction.MAX)
    last = int(places.max())
    # None: finite gradients whose sum is not. The parameter is then found by the sums alone.
    rank = int((places == last).nonzero()[0]) if last >= 0 else 0
    suspects = [units[last]] if last in units else [] if last >= 0 else [units[place] for place in sorted(units)]
    slots = (unit.first_not_finite() for unit in reversed(suspects))
    name = next((slot.name for slot in slots if slot is not None), "")
    return Fault(rank, _first_said(name, world, device))


def _first_said(name: str, world: Group, device: torch.device) -> str:
    """The name that the first rank with one has."""
    said = torch.zeros(world.size, _NAME_BYTES, dtype=torch.uint8, device=device)
    own = name.encode()[:_NAME_BYTES]
    said[world.index, : len(own)] = torch.tensor(list(own), dtype=torch.uint8, device=device)
    world.all_reduce(said, label="fault", reduction=Reduction.MAX)
    texts = (bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in said)
    return next((text for text in texts if text), "(unknown)")
