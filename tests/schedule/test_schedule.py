"""The checks of a schedule: what is malformed is reported, and what passes runs."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule.catalog import forward_only, gpipe, one_f_one_b
from meshwright.schedule.op import Kind, Op
from meshwright.schedule.schedule import Schedule

numbers = st.integers(0, 50)
ops = st.builds(Op, st.sampled_from(Kind), numbers, numbers)
ranks = st.lists(st.lists(ops, max_size=6).map(tuple), max_size=4).map(tuple)
names = st.from_regex(r"[a-z0-9-]+", fullmatch=True)
valid = st.builds(
    lambda make, stages, micro_batches: make(stages, micro_batches),
    st.sampled_from([gpipe, one_f_one_b, forward_only]),
    st.integers(1, 3),
    st.integers(1, 3),
)


def schedule_of(*rows: str, micro_batches: int, stages: int | None = None) -> Schedule:
    parsed = tuple(tuple(Op.parse(op) for op in row.split()) for row in rows)
    return Schedule("test", stages or len(rows), micro_batches, parsed)


@given(st.builds(Schedule, names, numbers, numbers, ranks))
@settings(max_examples=50, deadline=None)
def test_any_schedule_reads_back_from_its_text(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule


def test_the_text_form_is_a_heading_and_a_row_per_rank() -> None:
    assert str(one_f_one_b(2, 3)) == (
        "1f1b stages=2 micro-batches=3\n0: F0@0 F1@0 B0@0 F2@0 B1@0 B2@0\n1: F0@1 B0@1 F1@1 B1@1 F2@1 B2@1"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1f1b 2 3", "does not begin a schedule"),
        ("1f1b stages=1 micro-batches=1\n1: F0@0", 'the next rank is "0:"'),
        ("1f1b stages=1 micro-batches=1\n0: F0", "an op reads like"),
    ],
)
def test_text_that_is_no_schedule_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule.parse(text)


@given(valid, st.data())
@settings(max_examples=40, deadline=None)
def test_an_op_that_is_missing_is_reported(schedule: Schedule, data: st.DataObject) -> None:
    # The only backward of a schedule may go: what is left is forward only.
    rank = data.draw(st.integers(0, len(schedule.ranks) - 1))
    gone = data.draw(st.sampled_from(schedule.ranks[rank]))
    rest = tuple(tuple(op for op in row if op != gone) for row in schedule.ranks)
    broken = Schedule(schedule.name, schedule.stages, schedule.micro_batches, rest)
    if gone.kind is Kind.FORWARD or broken.trains:
        assert f"{gone} is missing; it belongs to rank {rank}" in broken.problems()


@given(valid, st.data())
@settings(max_examples=40, deadline=None)
def test_an_op_on_the_wrong_rank_is_reported(schedule: Schedule, data: st.DataObject) -> None:
    if len(schedule.ranks) == 1:
        return
    home, away = data.draw(st.permutations(range(len(schedule.ranks))))[:2]
    moved = data.draw(st.sampled_from(schedule.ranks[home]))
    rows = [[op for op in row if op != moved] for row in schedule.ranks]
    rows[away].append(moved)
    broken = Schedule(schedule.name, schedule.stages, schedule.micro_batches, tuple(map(tuple, rows)))
    assert f"{moved} stands on rank {away}; stage {moved.stage} belongs to rank {home}" in broken.problems()


def test_ops_twice_and_ops_that_do_not_exist_are_reported() -> None:
    problems = schedule_of("F0@0 F0@0 F1@0 F0@7 B0@0", micro_batches=1).problems()
    assert "F0@0 happens 2 times; once is right" in problems
    assert "F1@0 is none of stages 0 to 0 and micro-batches 0 to 0" in problems
    assert "F0@7 is none of stages 0 to 0 and micro-batches 0 to 0" in problems


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_a_schedule_of_nothing_is_reported(sizes: tuple[int, int]) -> None:
    assert "must be at least 1" in Schedule("none", *sizes, ((),)).problems()[0]
    assert "must be at least 1" in Schedule("none", 1, 1, ()).problems()[0]


def test_a_cycle_of_waiting_is_reported_with_what_each_rank_waits_for() -> None:
    problems = schedule_of("F0@0 B0@0 F1@0 B1@0", "F0@1 F1@1 B0@1 B1@1", micro_batches=2).problems()
    assert problems == (
        "rank 0 waits for ever: it stands at B0@0, which needs B0@1",
        "rank 1 waits for ever: it stands at F1@1, which needs F1@0",
    )


def test_a_backward_before_its_own_forward_is_reported() -> None:
    assert "stands at B0@0, which needs F0@0" in schedule_of("B0@0 F0@0", micro_batches=1).problems()[0]


def test_a_message_taken_out_of_turn_is_reported() -> None:
    problems = schedule_of("F0@0 F1@0 B0@0 B1@0", "F1@1 F0@1 B0@1 B1@1", micro_batches=2).problems()
    assert problems == (
        "message 0 from rank 0 to rank 1 is F0@0, but rank 1 takes F1@0 first; take them in the order they are sent",
    )
    backwards = schedule_of("F0@0 F1@0 B0@0 B1@0", "F0@1 F1@1 B1@1 B0@1", micro_batches=2).problems()
    assert len(backwards) == 1
    assert "from rank 1 to rank 0 is B1@1" in backwards[0]


def test_every_problem_stands_in_the_error() -> None:
    with pytest.raises(ValueError, match=r"cannot run:\n  F0@0 is missing.*\n  B0@1 is missing"):
        schedule_of("B0@0", "F0@1", micro_batches=1).check()


def test_several_stages_on_a_rank_are_legal() -> None:
    schedule = schedule_of("F0@0 F0@2 B0@2 B0@0", "F0@1 F0@3 B0@3 B0@1", micro_batches=1, stages=4)
    assert schedule.problems() == ()
    assert [schedule.rank_of(stage) for stage in range(4)] == [0, 1, 0, 1]


def _runs_with_untagged_messages(schedule: Schedule) -> bool:
    """A machine that knows queues only: one per direction and kind, and what comes out must be what is needed."""
    last = schedule.stages - 1
    queues: dict[tuple[int, Kind], deque[int]] = {}
    pending = [deque(row) for row in schedule.ranks]
    forwarded: set[tuple[int, int]] = set()
    while any(pending):
        for row in pending:
            if not row:
                continue
            op = row[0]
            inner = op.stage > 0 if op.kind is Kind.FORWARD else op.stage < last
            queue = queues.setdefault((op.stage, op.kind), deque())
            if inner and not queue:
                continue
            if inner and queue.popleft() != op.micro_batch:
                return False
            if op.kind is Kind.BACKWARD and (op.micro_batch, op.stage) not in forwarded:
                return False
            if op.kind is Kind.FORWARD:
                forwarded.add((op.micro_batch, op.stage))
            target = op.stage + 1 if op.kind is Kind.FORWARD else op.stage - 1
            queues.setdefault((target, op.kind), deque()).append(op.micro_batch)
            row.popleft()
            break
        else:
            return False
    return True


@given(valid, st.data())
@settings(max_examples=80, deadline=None)
def test_an_order_has_no_problems_exactly_if_it_runs_with_untagged_messages(
    schedule: Schedule, data: st.DataObject
) -> None:
    rows = [list(row) for row in schedule.ranks]
    for row in rows:
        for _ in range(data.draw(st.integers(0, 2))):
            index = data.draw(st.integers(0, len(row) - 1))
            row.insert(data.draw(st.integers(0, len(row) - 1)), row.pop(index))
    shuffled = Schedule("shuffled", schedule.stages, schedule.micro_batches, tuple(map(tuple, rows)))
    assert (shuffled.problems() == ()) == _runs_with_untagged_messages(shuffled)
