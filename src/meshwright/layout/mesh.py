"""The mesh: ranks on three axes, and the groups along each axis.

Pure arithmetic, no processes: `comm` turns the groups named here into live ones. The order of the axes is said once, in
`ORDER`: data > pipeline > tensor, so that the ranks of a tensor group, which talk the most, are neighbours on the
fastest link (Narayanan et al., 2021, section 3).

    dp2.tp2.pp2      pipeline 0   pipeline 1
    data 0             0   1        2   3        tensor 0 and 1 side by side
    data 1             4   5        6   7

Model states may be divided over runs of neighbours on the data axis only (HSDP): each run then holds a copy of them.

    dp4, shard 2     data 0   data 1 │ data 2   data 3        shard groups    (0 1) (2 3)    divide the states
                        0        1   │    2        3          replica groups  (0 2) (1 3)    hold the same part of them
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from meshwright.layout.nearest import nearest_divisors, one_of


class Axis(StrEnum):
    """A direction of the mesh."""

    DATA = "data"
    PIPELINE = "pipeline"
    TENSOR = "tensor"


ORDER = (Axis.DATA, Axis.PIPELINE, Axis.TENSOR)
"""The axes from the outermost (slowest link) to the innermost."""


@dataclass(frozen=True)
class Coordinate:
    """The place of a rank: its index on each axis."""

    data: int
    pipeline: int
    tensor: int

    def along(self, axis: Axis) -> int:
        """The index on one axis."""
        match axis:
            case Axis.DATA:
                return self.data
            case Axis.PIPELINE:
                return self.pipeline
            case Axis.TENSOR:
                return self.tensor
            case _:
                assert_never(axis)

    def moved(self, axis: Axis, index: int) -> Coordinate:
        """The place with another index on one axis."""
        return replace(self, **{axis.value: index})


@dataclass(frozen=True)
class Mesh:
    """The sizes of the axes; each is at least 1, and 1 is the ordinary case."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in ORDER:
            if self.extent(axis) < 1:
                raise ValueError(f"the {axis} axis has {self.extent(axis)} ranks; it needs at least 1")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data * self.pipeline * self.tensor

    def extent(self, axis: Axis) -> int:
        """Number of ranks along an axis."""
        match axis:
            case Axis.DATA:
                return self.data
            case Axis.PIPELINE:
                return self.pipeline
            case Axis.TENSOR:
                return self.tensor
            case _:
                assert_never(axis)

    def coordinate(self, rank: int) -> Coordinate:
        """The place of a rank. Raises ValueError outside 0 .. size-1."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not on a mesh of {self.size} ranks; take 0 to {self.size - 1}")
        outer, tensor = divmod(rank, self.tensor)
        data, pipeline = divmod(outer, self.pipeline)
        return Coordinate(data, pipeline, tensor)

    def rank(self, coordinate: Coordinate) -> int:
        """The rank at a place. Raises ValueError outside the mesh."""
        for axis in ORDER:
            if not 0 <= coordinate.along(axis) < self.extent(axis):
                raise ValueError(
                    f"{coordinate} is not on the mesh: the {axis} axis has the indices 0 to {self.extent(axis) - 1}"
                )
        return (coordinate.data * self.pipeline + coordinate.pipeline) * self.tensor + coordinate.tensor

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` only, itself among them, in the order of the axis."""
        here = self.coordinate(rank)
        return tuple(self.rank(here.moved(axis, index)) for index in range(self.extent(axis)))

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Every group along `axis`; each rank is in exactly one. Ordered by their first rank."""
        firsts = (rank for rank in range(self.size) if self.coordinate(rank).along(axis) == 0)
        return tuple(self.group(axis, rank) for rank in firsts)

    def shard_group(self, rank: int, shard: int) -> tuple[int, ...]:
        """The run of `shard` consecutive ranks of the data axis that `rank` is in: they divide the model states.

        Raises ValueError where `shard` does not divide the axis.
        """
        line, index = self._data_line(rank, shard)
        first = index - index % shard
        return line[first : first + shard]

    def replica_group(self, rank: int, shard: int) -> tuple[int, ...]:
        """The ranks with `rank`'s place in every run of `shard`: they hold the same part of the model states.

        Raises ValueError where `shard` does not divide the axis.
        """
        line, index = self._data_line(rank, shard)
        return line[index % shard :: shard]

    def _data_line(self, rank: int, shard: int) -> tuple[tuple[int, ...], int]:
        """The data group of a rank, and its index in it."""
        if shard < 1 or self.data % shard:
            choice = one_of(nearest_divisors(self.data, max(shard, 1)))
            raise ValueError(f"runs of {shard} ranks do not divide {self.data} data ranks; try {choice}")
        return self.group(Axis.DATA, rank), self.coordinate(rank).data
