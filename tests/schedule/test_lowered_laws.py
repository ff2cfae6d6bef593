"""The laws that every lowered program keeps, over all schedules, cuts and layouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import Machine

from meshwright.layout.layout import Layout
from meshwright.layout.layout import Recompute as RecomputeMode
from meshwright.layout.zero import ZeroStage
from meshwright.schedule.catalog import forward_only, gpipe, one_f_one_b
from meshwright.schedule.cut import Cut, Tie
from meshwright.schedule.op import Kind, Op
from meshwright.schedule.passes import lower
from meshwright.schedule.program import (
    Action,
    Backward,
    Forward,
    Gather,
    Program,
    Receive,
    Recompute,
    Release,
    Send,
)
from meshwright.schedule.schedule import Schedule


def _cuts(stages: int) -> Iterator[Cut]:
    for each in (1, 2):
        bounds = tuple(stage * each for stage in range(stages + 1))
        last = bounds[-1] - 1
        yield Cut(bounds)
        yield Cut(bounds, (Tie("tied", (0, last)) if last else Tie("tied", (0,)),))
        yield Cut(bounds, (Tie("tied", tuple(range(last + 1))), Tie("first", (0,))))


MAKERS = (gpipe, one_f_one_b, forward_only)
CASES = [
    (make(stages, micro_batches), Layout(data=2, zero=zero, recompute=recompute))
    for make, stages, micro_batches in product(MAKERS, (1, 2, 3, 4), (1, 2, 5))
    for zero, recompute in product(ZeroStage, RecomputeMode)
]


def _name(case: tuple[Schedule, Layout]) -> str:
    schedule, layout = case
    return f"{schedule.name}-pp{schedule.stages}-m{schedule.micro_batches}-zero{int(layout.zero)}-{layout.recompute}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_every_program_finds_its_units_whole_and_reduces_each_gradient_after_its_last_backward(
    case: tuple[Schedule, Layout],
) -> None:
    schedule, layout = case
    for cut in _cuts(schedule.stages):
        for rank in range(len(schedule.ranks)):
            _run(schedule, rank, cut, layout)


def _run(schedule: Schedule, rank: int, cut: Cut, layout: Layout) -> None:
    machine = Machine(schedule, rank, cut, layout)
    machine.run(lower(schedule, rank, cut, layout))
    expected = machine.units if schedule.trains and layout.zero in (1, 2) else set()
    assert sorted(machine.gathered_after_step) == sorted(expected)


schedules = st.builds(
    lambda make, stages, m: make(stages, m), st.sampled_from(MAKERS), st.integers(1, 4), st.integers(1, 5)
)


@st.composite
def cuts(draw: st.DrawFn, stages: int) -> Cut:
    bounds = [0]
    for _ in range(stages):
        bounds.append(bounds[-1] + draw(st.integers(1, 4)))
    layers = st.lists(st.integers(0, bounds[-1] - 1), min_size=1, max_size=3, unique=True).map(tuple)
    return Cut(tuple(bounds), tuple(Tie(name, draw(layers)) for name in draw(st.sampled_from(("", "t", "tu")))))


@given(st.data(), schedules, st.sampled_from(RecomputeMode), st.sampled_from((0, 2, 4)))
@settings(max_examples=60, deadline=None)
def test_replicas_and_prefetch_keep_the_laws(
    data: st.DataObject, schedule: Schedule, recompute: RecomputeMode, shard: int
) -> None:
    cut = data.draw(cuts(schedule.stages))
    zero, prefetch = data.draw(st.sampled_from(list(ZeroStage)[1:])), data.draw(st.integers(0, 6))
    layout = Layout(data=4, zero=zero, recompute=recompute, shard=shard, prefetch=prefetch)
    for rank in range(len(schedule.ranks)):
        _run(schedule, rank, cut, layout)


@given(st.data(), schedules, st.sampled_from(RecomputeMode), st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_prefetch_moves_gathers_and_nothing_else_and_as_far_as_it_may(
    data: st.DataObject, schedule: Schedule, recompute: RecomputeMode, depth: int
) -> None:
    cut = data.draw(cuts(schedule.stages))
    lowered = [
        lower(schedule, rank, cut, Layout(data=2, zero=ZeroStage.PARAMETERS, recompute=recompute, prefetch=prefetch))
        for rank in range(schedule.stages)
        for prefetch in (0, depth)
    ]
    for plain, ahead in zip(lowered[::2], lowered[1::2], strict=True):
        assert sorted(map(str, plain.actions)) == sorted(map(str, ahead.actions))
        assert _without_gathers(plain) == _without_gathers(ahead)
        for before, most in _computed_meanwhile(ahead, cut):
            assert before == min(depth, most)


def _without_gathers(program: Program) -> list[Action]:
    return [action for action in program.actions if not isinstance(action, Gather)]


def _computed_meanwhile(program: Program, cut: Cut) -> Iterator[tuple[int, int]]:
    """For each gather how many uses of layers start between it and its own use, and how many could at most.

    No more could than start behind the release of the same unit before.
    """
    actions = program.actions
    again = {(action.op.micro_batch, action.layer) for action in actions if isinstance(action, Recompute)}
    starts = {
        index: action.layer
        for index, action in enumerate(actions)
        if isinstance(action, Forward | Recompute)
        or (isinstance(action, Backward) and (action.op.micro_batch, action.layer) not in again)
    }
    released: dict[str, int] = {}
    for at, action in enumerate(actions):
        if isinstance(action, Release):
            released[action.unit] = at
        if isinstance(action, Gather):
            own = next(start for start, layer in starts.items() if start > at and action.unit in cut.units(layer))
            since = released.get(action.unit, -1)
            yield sum(at < start < own for start in starts), sum(since < start < own for start in starts)


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_on_all_ranks_together_every_receive_meets_its_send_in_order(
    case: tuple[Schedule, Layout],
) -> None:
    schedule, layout = case
    cut = Cut(tuple(range(0, 2 * schedule.stages + 1, 2)))
    sent: dict[tuple[int, int, Kind], list[Op]] = defaultdict(list)
    received: dict[tuple[int, int, Kind], list[Op]] = defaultdict(list)
    for rank in range(len(schedule.ranks)):
        actions = lower(schedule, rank, cut, layout).actions
        computed = [
            (action.op, index) for index, action in enumerate(actions) if isinstance(action, Forward | Backward)
        ]
        first = dict(reversed(computed))
        last = dict(computed)
        for index, action in enumerate(actions):
            if isinstance(action, Send):
                assert index > last[action.op]
                sent[rank, action.peer, action.op.kind].append(action.op)
            if isinstance(action, Receive):
                step = 1 if action.op.kind is Kind.FORWARD else -1
                user = Op(action.op.kind, action.op.micro_batch, action.op.stage + step)
                assert index < first[user]
                received[action.peer, rank, action.op.kind].append(action.op)
    assert sent == received
    kinds = 2 if schedule.trains else 1
    assert sum(map(len, sent.values())) == kinds * schedule.micro_batches * (schedule.stages - 1)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize("zero", ZeroStage)
def test_every_wait_for_a_gradient_follows_the_first_recompute(
    make: Callable[[int, int], Schedule], zero: ZeroStage
) -> None:
    schedule = make(3, 4)
    layout = Layout(data=2, zero=zero, recompute=RecomputeMode.FULL)
    for rank in (0, 1):
        actions = lower(schedule, rank, Cut((0, 2, 4, 6)), layout).actions
        waits = [
            at for at, action in enumerate(actions) if isinstance(action, Receive) and action.op.kind is Kind.BACKWARD
        ]
        assert len(waits) == 4
        for at in waits:
            before, after = actions[at - 1], actions[at + 1]
            assert isinstance(before, Recompute)
            assert isinstance(after, Backward)
            assert before.layer == after.layer
