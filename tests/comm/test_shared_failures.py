"""A rank that is killed, stopped, slow, or does something else is named by those that wait for it, in time."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from outcomes import Ranks, signal_self, started

from meshwright.comm.connect import Groups
from meshwright.comm.group import MismatchError, Reduction
from meshwright.layout.mesh import Mesh
from pool import RankPool

pytestmark = pytest.mark.ranks

SOON = 4.0
"""Seconds in which a death is known on a machine that has other things to do; alone, it is less than one."""


def killed_while(groups: Groups, how: str) -> float:
    """Rank 1 is killed in the middle of something that the others need it for; how long rank 0 waits."""
    tensor = torch.ones(2_000_000 if how == "large" else 10)
    groups.world.barrier()
    if groups.rank == 1:
        if how == "large":
            groups.data.start_all_reduce(tensor, label="gradients")  # posted, and never carried on
        signal_self(signal.SIGKILL)
    begun = time.monotonic()
    try:
        groups.data.all_reduce(tensor, label="gradients")
    except RuntimeError as error:
        raise RuntimeError(f"{error} (after {time.monotonic() - begun:.2f} s)") from error
    return 0.0


@pytest.mark.parametrize("how", ["small", "large"])
def test_a_killed_rank_is_named_soon(how: str) -> None:
    with started(Mesh(3), killed_while, how) as ranks:
        first, killed, last = (ranks.outcome(rank) for rank in range(3))
    assert killed.error == "killed"
    for rank, outcome in ((0, first), (2, last)):
        found = re.fullmatch(
            rf"RuntimeError: rank {rank} in data group \(0, 1, 2\): all-reduce of gradients failed after waiting "
            r"\d\.\d s: rank 1 ended without having arrived \(after ([\d.]+) s\)",
            outcome.error,
        )
        assert found, outcome.error
        assert float(found[1]) < SOON


def killed_before_it_sends(groups: Groups) -> None:
    if groups.rank == 1:
        signal_self(signal.SIGKILL)
    groups.activations.receive(torch.ones(5), 1).wait()


def test_a_rank_that_is_killed_before_it_sends_is_named() -> None:
    with started(Mesh(pipeline=2), killed_before_it_sends) as ranks:
        error = ranks.outcome(0).error
    assert "rank 0 from rank 1: receive of activations failed after waiting" in error
    assert "rank 1 ended without having arrived" in error


def leaves_early(groups: Groups) -> float:
    """Rank 0 has done its part and ends; what it gave is still there for the others."""
    tensor = torch.full((5,), 3.0 + groups.rank)
    if groups.rank == 0:
        groups.activations.send(tensor, 1).wait()
    else:
        time.sleep(1.0)
        groups.activations.receive(tensor, 0).wait()
    return tensor[0].item()


def test_a_rank_that_ends_after_its_part_is_no_failure() -> None:
    with started(Mesh(pipeline=2), leaves_early) as ranks:
        assert ranks.outcome(1).result == 3.0


def comes_late(groups: Groups, how: str) -> None:
    groups.world.barrier()
    if groups.rank == 1:
        if how == "stopped":
            signal_self(signal.SIGSTOP)
        time.sleep(60)
    groups.data.all_reduce(torch.ones(4), label="gradients")


@pytest.mark.parametrize(
    ("how", "reason"),
    [("stopped", r"its process \d+ is stopped"), ("slow", "it is running and waits for nobody")],
)
def test_a_rank_that_does_not_come_in_time_is_named(how: str, reason: str) -> None:
    with started(Mesh(2), comes_late, how, timeout=1.0) as ranks:
        error = ranks.outcome(0).error
    expected = r"CommunicationError: rank 0 in data group \(0, 1\): all-reduce of gradients failed after waiting [123]"
    assert re.fullmatch(rf"{expected}\.\d s: rank 1 has not arrived: {reason}", error), error


def waits_elsewhere(groups: Groups) -> None:
    group, label = (groups.world, "norm") if groups.rank else (groups.data, "gradients")
    try:
        group.all_reduce(torch.ones(4), label=label)
    finally:
        time.sleep(2.0)  # as a rank does that has other things to tidy up


def test_ranks_that_wait_for_each_other_in_different_groups_say_so() -> None:
    with started(Mesh(2), waits_elsewhere, timeout=1.0) as ranks:
        errors = [ranks.outcome(rank).error for rank in range(2)]
    one = r"rank 1 has not arrived: it (waits for rank 0|has given up): rank 1 in world group \(0, 1\): all-reduce"
    other = r"rank 0 has not arrived: it (waits for rank 1|has given up): rank 0 in data group \(0, 1\): all-reduce"
    assert re.search(one, errors[0]), errors
    assert re.search(other, errors[1]), errors


# --- ranks that do not do the same ------------------------------------------------------------------------------------


def differ(groups: Groups, what: str) -> None:
    """Rank 1 calls something that differs from what the others call in this."""
    group, odd = groups.data, groups.rank == 1
    match what:
        case "kind" if odd:
            group.barrier()
        case "size":
            group.all_reduce(torch.ones(60_000 + groups.rank), label="gradients")
        case "dtype":
            group.all_reduce(torch.ones(6, dtype=torch.float64 if odd else torch.float32), label="gradients")
        case "label":
            group.all_reduce(torch.ones(6), label="norm" if odd else "gradients")
        case "reduction":
            reduction = Reduction.MAX if odd else Reduction.SUM
            group.all_reduce(torch.ones(6), label="gradients", reduction=reduction)
        case "root":
            group.broadcast(torch.ones(6), groups.rank % 2, label="weights")
        case _:
            group.all_reduce(torch.ones(6), label="gradients")


def differs(groups: Groups, what: str) -> str:
    with pytest.raises(MismatchError) as raised:
        differ(groups, what)
    for _ in range(40):  # every rank knows, so the group can go on
        tensor = torch.ones(3)
        groups.data.all_reduce(tensor, label="after")
        assert tensor.tolist() == [3.0] * 3
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "odd", "others"),
    [
        ("kind", "barrier of barrier, 0 uint8", "all-reduce of gradients (sum), 6 float32"),
        ("size", "all-reduce of gradients (sum), 60001 float32", "all-reduce of gradients (sum), 60000 float32"),
        ("dtype", "all-reduce of gradients (sum), 6 float64", "all-reduce of gradients (sum), 6 float32"),
        ("label", "all-reduce of norm (sum), 6 float32", "all-reduce of gradients (sum), 6 float32"),
        ("reduction", "all-reduce of gradients (max), 6 float32", "all-reduce of gradients (sum), 6 float32"),
        ("root", "broadcast of weights (from index 1), 6", "broadcast of weights (from index 0), 6"),
    ],
)
def test_ranks_that_do_different_things_get_one_error_that_shows_all(
    pool: RankPool, what: str, odd: str, others: str
) -> None:
    texts = set(pool.run(Mesh(3), differs, what))
    if what == "size":  # three sizes
        assert len(texts) == 1
        assert odd in texts.pop()
        return
    (text,) = texts
    lines = text.splitlines()
    assert re.fullmatch(r"data group \(0, 1, 2\): operation \d+ is not the same on all ranks:", lines[0])
    assert lines[1].startswith(f"  rank 0, 2: {others}")
    assert lines[2].startswith(f"  rank 1: {odd}")


def message_of_another_size(groups: Groups) -> str:
    if groups.rank == 0:
        groups.activations.send(torch.zeros(2, 3), 1).wait()
        groups.activations.send(torch.ones(4), 1).wait()
        return ""
    with pytest.raises(MismatchError) as raised:
        groups.activations.receive(torch.zeros(2, 3, dtype=torch.float64), 0).wait()
    tensor = torch.zeros(4)
    groups.activations.receive(tensor, 0).wait()
    assert tensor.tolist() == [1.0] * 4
    return str(raised.value)


def test_a_message_that_does_not_fit_its_receiver_is_refused(pool: RankPool) -> None:
    _, text = pool.run(Mesh(pipeline=2), message_of_another_size)
    assert text.endswith("of activations: rank 0 sent 6 float32 elements, but rank 1 receives 6 float64 elements")


# --- ranks that are killed at any moment ------------------------------------------------------------------------------


def everything(groups: Groups, seconds: float) -> str:
    """All kinds of communication until the time is over or a rank is dead; then, what this process maps."""
    group, stages = groups.data, groups.pipeline
    end = time.monotonic() + seconds
    whole, buffer = group.whole(100_000 * group.size, torch.float32), group.buffer(60_000, torch.float32)
    over = torch.tensor([False])
    while not over.item():
        shard = whole.view(group.size, -1)[group.index]
        handle = group.start_all_reduce(buffer, label="a")
        group.all_gather(shard, whole, label="b")
        group.reduce_scatter(torch.ones(group.size * 5_000), torch.empty(5_000), label="c")
        handle.wait()
        for peer in {stages.index ^ 1} & set(range(stages.size)):
            groups.activations.send(torch.ones(70_000), peer).wait()
            groups.activations.receive(torch.empty(70_000), peer).wait()
        over.fill_(time.monotonic() > end)
        groups.world.all_reduce(over, label="d", reduction=Reduction.MAX)
    return Path("/proc/self/maps").read_text()


def named_memory(ranks: Ranks) -> list[str]:
    """What the processes have open or mapped in /dev/shm: only that could be left there."""
    found = []
    for process in ranks.processes:
        folder = Path(f"/proc/{process.pid}")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [line for line in (folder / "maps").read_text().splitlines() if "/dev/shm" in line]
            found += [str(link.readlink()) for link in (folder / "fd").iterdir() if "/dev/shm" in str(link.readlink())]
    return found


def check_a_kill(seed: int) -> None:
    """Start ranks, kill one at some moment, and see that each of the others says so, and that nothing can be left."""
    dice = random.Random(seed)
    mesh = dice.choice([Mesh(2), Mesh(3), Mesh(pipeline=2), Mesh(2, 2, 1)])
    with started(mesh, everything, 60.0, timeout=4.0) as ranks:
        time.sleep(dice.uniform(0.0, 1.5))
        assert named_memory(ranks) == []
        victim = dice.randrange(mesh.size)
        when = ranks.kill(victim)
        check_the_others(ranks, mesh, victim, when)


def check_the_others(ranks: Ranks, mesh: Mesh, victim: int, when: float) -> None:
    outcomes = [ranks.outcome(rank) for rank in range(mesh.size) if rank != victim]
    known = [outcome for outcome in outcomes if f"rank {victim} ended without having arrived" in outcome.error]
    assert all(outcome.when - when < SOON for outcome in known), (when, outcomes)
    for outcome in outcomes:
        # A rank whose peers have not even met it is not known by its process; it is missed in the store, in the end.
        while_meeting = "missing after" in outcome.error or "cannot share memory" in outcome.error
        assert "ended without having arrived" in outcome.error or while_meeting, outcomes
    assert known or all("arrived" not in outcome.error for outcome in outcomes), outcomes


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_killed_at_any_moment_is_named_and_leaves_nothing_behind(seed: int) -> None:
    check_a_kill(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_killed_at_a_hundred_moments_are_named_and_leave_nothing_behind() -> None:
    for seed in range(100):
        check_a_kill(seed)


def test_the_memory_of_ranks_has_no_name_in_a_file_system() -> None:
    with started(Mesh(2), everything, 0.5) as ranks:
        outcomes = [ranks.outcome(rank) for rank in range(2)]
    for outcome in outcomes:
        assert outcome.error == ""
        assert "/memfd:meshwright (deleted)" in outcome.result
        assert "/dev/shm" not in outcome.result
