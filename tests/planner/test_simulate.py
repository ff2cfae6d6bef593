"""The simulator keeps what theory says."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.layout.layout import ScheduleName
from meshwright.planner.simulate import simulate
from meshwright.schedule.catalog import bubble, build, forward_only
from meshwright.schedule.op import Kind, Op, needs
from meshwright.schedule.schedule import Schedule
from meshwright.schedule.timeline import Number


def forward_one_backward_two(op: Op) -> Number:
    return 1 if op.kind is Kind.FORWARD else 2


@pytest.mark.parametrize("name", ScheduleName)
@pytest.mark.parametrize(("p", "m"), [*product((1, 2, 3, 4, 8), (1, 2, 3, 4, 8, 17))])
def test_the_simulated_bubble_equals_the_closed_form(name: ScheduleName, p: int, m: int) -> None:
    simulated = simulate(build(name, p, m), forward_one_backward_two)
    assert simulated.bubble == Fraction(p - 1, m + p - 1) == bubble(p, m)
    assert simulated.makespan == 3 * (m + p - 1)


@given(
    st.sampled_from(ScheduleName),
    st.integers(1, 5),
    st.integers(1, 7),
    st.fractions(Fraction(1, 9), 3, max_denominator=9),
    st.fractions(Fraction(1, 9), 3, max_denominator=9),
)
@settings(max_examples=30, deadline=None)
def test_the_bubble_does_not_depend_on_the_times_while_stages_are_equal(
    name: ScheduleName, p: int, m: int, forward: Fraction, backward: Fraction
) -> None:
    simulated = simulate(build(name, p, m), lambda op: forward if op.kind is Kind.FORWARD else backward)
    assert simulated.bubble == bubble(p, m)


def test_evaluation_fills_and_drains_once() -> None:
    assert simulate(forward_only(4, 8), lambda _: 1).makespan == 8 + 3


@given(st.sampled_from(ScheduleName), st.integers(1, 4), st.integers(1, 5), st.data())
@settings(max_examples=30, deadline=None)
def test_no_op_begins_before_what_it_needs_or_while_its_rank_is_busy(
    name: ScheduleName, p: int, m: int, data: st.DataObject
) -> None:
    schedule = build(name, p, m)
    durations = {op: data.draw(st.integers(0, 5)) for ops in schedule.ranks for op in ops}
    spans = {Op.parse(span.label): span for span in simulate(schedule, durations.__getitem__).spans}
    for ops in schedule.ranks:
        for before, after in zip((None, *ops), ops, strict=False):
            waited = [spans[need].end for need in needs(after, p)] + ([spans[before].end] if before else [])
            assert spans[after].start == max(waited, default=0)
            assert spans[after].end == spans[after].start + durations[after]


def test_a_slow_stage_is_what_the_pipeline_waits_for() -> None:
    timeline = simulate(build(ScheduleName.ONE_F_ONE_B, 3, 10), lambda op: 5 if op.stage == 1 else 1)
    assert timeline.makespan == 10 * 2 * 5 + 2 * 2 * 1 - 2
    assert timeline.busy(1) == 100


def test_a_schedule_that_cannot_run_is_not_simulated() -> None:
    with pytest.raises(ValueError, match="waits for ever"):
        simulate(Schedule("broken", 1, 1, ((Op.parse("B0@0"), Op.parse("F0@0")),)), forward_one_backward_two)
