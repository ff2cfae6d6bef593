"""Which transport carries a mesh: what was asked for, or what there is."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from meshwright.comm.connect import Groups, connect
from meshwright.comm.shared.channel import SharedChannel
from meshwright.comm.shared.group import SharedGroup
from meshwright.comm.shared.segment import Segment
from meshwright.comm.start import Start
from meshwright.comm.torch_channel import TorchChannel
from meshwright.comm.torch_group import TorchGroup
from meshwright.layout.mesh import Mesh
from pool import RankPool


def kinds(groups: Groups) -> set[type]:
    line = groups.among_stages("tied", (0, 1))
    return {type(each) for each in (groups.world, groups.pipeline, line, groups.activations, groups.gradients)}


@pytest.mark.ranks
def test_ranks_of_one_host_share_memory_unless_they_are_told_not_to(pool: RankPool) -> None:
    assert pool.run(Mesh(pipeline=2), kinds) == [{SharedGroup, SharedChannel}] * 2
    told = RankPool(transport="gloo")
    try:
        assert told.run(Mesh(pipeline=2), kinds) == [{TorchGroup, TorchChannel}] * 2
    finally:
        told.close()


def connected(groups: Groups, transport: str, folder: str) -> tuple[str, list[str], float]:
    """Connect once more, but rank 1 cannot open the segment."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("meshwright").addHandler(handler)
    opened = Segment.open
    if groups.rank == 1:
        Segment.open = classmethod(refuse)  # type: ignore[method-assign, assignment]
    try:
        start = Start(groups.rank, 3, groups.rank, 3, f"file://{folder}/store", attempt=0, agent_store=False)
        again = connect(Mesh(3), start, torch.device("cpu"), 10.0, transport)
        total = torch.ones(3)
        again.data.all_reduce(total, label="x")
        return type(again.data).__name__, said, total[0].item()
    except ValueError as error:
        return str(error), said, 0.0
    finally:
        Segment.open = opened  # type: ignore[method-assign]
        logging.getLogger("meshwright").removeHandler(handler)


def refuse(cls: type, process: int, file: int, size: int) -> Segment:
    raise PermissionError(13, os.strerror(13), f"/proc/{process}/fd/{file}")


@pytest.mark.ranks
def test_if_one_rank_cannot_map_the_memory_all_use_gloo_and_one_says_why(
    pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    results = pool.run(Mesh(3), connected, "auto", str(tmp_path_factory.mktemp("auto")))
    assert [(name, total) for name, _, total in results] == [("TorchGroup", 3.0)] * 3
    assert [len(said) for _, said, _ in results] == [1, 0, 0]
    assert "the ranks cannot share memory, so they use gloo: rank 1: [Errno 13] Permission denied" in results[0][1][0]


@pytest.mark.ranks
def test_if_memory_must_be_shared_and_cannot_all_ranks_say_why(
    pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for text, said, _ in pool.run(Mesh(3), connected, "shared", str(tmp_path_factory.mktemp("shared"))):
        assert text.startswith('transport = "shared": the ranks cannot share memory: rank 1: [Errno 13]')
        assert said == []


def test_ranks_of_several_hosts_cannot_share_memory(tmp_path: object) -> None:
    start = Start(0, 4, 0, 2, f"file://{tmp_path}/store", attempt=0, agent_store=False)
    with pytest.raises(ValueError, match=r"cannot share memory: of 4 ranks, 2 are on this host"):
        connect(Mesh(4), start, torch.device("cpu"), 1.0, "shared")


def test_a_transport_that_does_not_exist_is_refused_with_those_that_do(tmp_path: object) -> None:
    start = Start(0, 2, 0, 2, f"file://{tmp_path}/store", attempt=0, agent_store=False)
    with pytest.raises(ValueError, match='there is no transport "mpi"; there are auto, shared, gloo'):
        connect(Mesh(2), start, torch.device("cpu"), 1.0, "mpi")
