"""The cut: which layers stand on which stage, and which parameters several layers share.

    layers    0    1    2    3    4    5          Cut(bounds=(0, 2, 4, 6), ties=(Tie("tied", (0, 5)),))
    stage     └─ 0 ─┘   └─ 1 ─┘   └─ 2 ─┘
    tied      x                        x          held by stages 0 and 2; layer 0 is the owner

A *unit* is what is gathered, released and reduced together (ZeRO): one per layer, named by the layer's global index,
and one per tie. The cut knows no sizes and no modules; where the bounds should be is asked of `costs.balance`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Tie:
    """A parameter used by several layers; the first is its owner. `name` is one word and not a number."""

    name: str
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """Stage i holds the layers [bounds[i], bounds[i+1]), at least one.

    Raises ValueError for bounds that do not rise from 0, or a tie that is not one.
    """

    bounds: tuple[int, ...]
    ties: tuple[Tie, ...] = ()

    def __post_init__(self) -> None:
        if len(self.bounds) < 2 or self.bounds[0] != 0 or any(a >= b for a, b in pairwise(self.bounds)):
            raise ValueError(
                f"the bounds {self.bounds} are not a cut: they must rise from 0, each stage at least one layer"
            )
        names = [tie.name for tie in self.ties]
        if len(set(names)) < len(names):
            raise ValueError(f"two ties have one name: {', '.join(names)}")
        for tie in self.ties:
            if not tie.name or tie.name.isdecimal() or tie.name.split() != [tie.name]:
                raise ValueError(
                    f'"{tie.name}" cannot name a tie: it must be one word, and numbers are the units of layers'
                )
            if not tie.layers or any(not 0 <= layer < self.bounds[-1] for layer in tie.layers):
                raise ValueError(
                    f"tie {tie.name} is used by layers {tie.layers}; there are layers 0 to {self.bounds[-1] - 1}"
                )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    def layers(self, stage: int) -> range:
        """The global indices of a stage's layers."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def stage_of(self, layer: int) -> int:
        """The stage that holds a layer. Raises ValueError for a layer that is not there."""
        for stage in range(self.stages):
            if layer in self.layers(stage):
                return stage
        raise ValueError(f"there is no layer {layer}; there are layers 0 to {self.bounds[-1] - 1}")

    def units(self, layer: int) -> tuple[str, ...]:
        """What must be whole to compute a layer: its own unit and its ties'."""
        return (str(layer), *(tie.name for tie in self.ties if layer in tie.layers))

    def units_of(self, stage: int) -> tuple[str, ...]:
        """A stage's units, each once, in the order of their first use in the forward pass."""
        return self.units_of_stages((stage,))

    def units_of_stages(self, stages: Iterable[int]) -> tuple[str, ...]:
        """The units of several stages, each once, in the order of their first use."""
        used = (unit for stage in stages for layer in self.layers(stage) for unit in self.units(layer))
        return tuple(dict.fromkeys(used))

    def tie_stages(self, tie: Tie) -> tuple[int, ...]:
        """The stages that hold a tie, each once, in rising order."""
        return tuple(sorted({self.stage_of(layer) for layer in tie.layers}))
