"""Before the first step, ranks that would not run the same thing are told apart."""

from __future__ import annotations

import time

import pytest

from meshwright.comm.connect import Groups, connect, solo
from meshwright.comm.group import CommunicationError
from meshwright.comm.handshake import agree
from meshwright.comm.start import Start
from meshwright.layout.mesh import Mesh
from pool import RankPool


def state(groups: Groups, batch: int, name: str) -> str:
    """The error this rank gets for its statement, or nothing. Each test states under a prefix of its own."""
    import torch.distributed as dist

    assert groups.wiring is not None
    store = dist.PrefixStore(name, groups.wiring.store)
    try:
        agree(store, groups.rank, groups.mesh.size, {"config.batch": str(batch), "torch": "2.13.0"}, timeout=10)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_agree_go_on(pool: RankPool) -> None:
    assert pool.run(Mesh(data=3), state, 8, "same") == ["", "", ""]


def test_a_difference_is_named_with_both_values_and_its_rank_on_every_rank(pool: RankPool) -> None:
    texts = pool.run_each(Mesh(data=3), state, [(8, "other"), (8, "other"), (16, "other")])
    for text in texts:
        assert "config.batch: 8 on rank 0, 16 on rank 2" in text
        assert "torch" not in text


def test_one_process_agrees_with_itself() -> None:
    solo().agree({"anything": "at all"})


def absent(groups: Groups) -> str:
    import torch.distributed as dist

    assert groups.wiring is not None
    store = dist.PrefixStore("absent", groups.wiring.store)
    if groups.rank == 1:
        return ""
    begun = time.monotonic()
    with pytest.raises(CommunicationError) as raised:
        agree(store, groups.rank, groups.mesh.size, {"a": "b"}, timeout=0.5)
    assert time.monotonic() - begun < 5
    return str(raised.value)


def test_a_rank_that_never_states_anything_is_named(pool: RankPool) -> None:
    assert "missing after 0.5 s: ranks [1]" in pool.run(Mesh(data=2), absent)[0]


def test_a_mesh_of_another_size_than_was_started_is_refused_with_both_numbers() -> None:
    import torch

    start = Start(0, 2, 0, 2, "file:///nowhere", attempt=0, agent_store=False)
    with pytest.raises(ValueError, match=r"needs 4 ranks \(data 2 x pipeline 1 x tensor 2\), but 2 were started"):
        connect(Mesh(data=2, tensor=2), start, torch.device("cpu"))
