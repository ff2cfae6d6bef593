"""The doctor measures every collective on every axis, and notices one that computes something else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.comm.connect import Groups
from meshwright.comm.diagnosis import Examination, Measurement
from meshwright.comm.doctor import COLLECTIVES, copy_rate, is_right, measurements, wrong_results
from meshwright.comm.group import Done, Group, Handle, Reduction
from meshwright.comm.ledger import Kind, Ledger
from meshwright.layout.mesh import Mesh
from pool import RankPool


def examined(groups: Groups, examination: Examination) -> list[Measurement]:
    assert copy_rate(groups, 1) > 0
    return list(measurements(groups, examination))


@pytest.mark.ranks
def test_every_axis_with_several_ranks_is_examined(pool: RankPool, tmp_path: Path) -> None:
    mesh = Mesh(data=2, pipeline=2)
    kinds = [kind for kind in COLLECTIVES for _ in range(2)] + [Kind.BARRIER]
    for found in pool.run(mesh, examined, Examination(mesh, (400, 40_000), 1, tmp_path)):
        assert [row.kind for row in found if row.axis == "data"] == kinds
        assert [row.kind for row in found if row.axis == "pipeline"] == [*kinds, Kind.SEND, Kind.SEND]
        assert all(row.seconds > 0 and not row.wrong for row in found)
        assert {row.payload for row in found} == {0, 400, 40_000}


class Idle(Group):
    """A group that does nothing and says that it is done."""

    def __init__(self) -> None:
        super().__init__("data", (0, 1), 0, Ledger())

    def start_all_reduce(self, tensor: Tensor, *, label: str, reduction: Reduction = Reduction.SUM) -> Handle:
        return Done()

    def start_reduce_scatter(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        return Done()

    def start_all_gather(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        return Done()

    def start_broadcast(self, tensor: Tensor, source: int, *, label: str) -> Handle:
        return Done()

    def start_all_to_all(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        return Done()

    def barrier(self) -> None:
        pass


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_collective_that_computes_something_else_is_noticed(kind: Kind) -> None:
    assert not is_right(Idle(), kind, 5, torch.float32)
    assert f"rank 0 in data group (0, 1): {kind} of 2 x 5 bfloat16 elements is wrong" in set(
        wrong_results(Idle(), kind)
    )
