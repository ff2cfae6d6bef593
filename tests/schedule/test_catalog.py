"""The known schedules are legal and hold as many micro-batches as theory says."""

from __future__ import annotations

from itertools import product

import pytest

from meshwright.layout.layout import ScheduleName
from meshwright.schedule.catalog import build, forward_only, gpipe, one_f_one_b
from meshwright.schedule.schedule import Schedule

SIZES = list(product((1, 2, 3, 4, 7), (1, 2, 3, 4, 8, 13)))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_every_known_schedule_can_run_even_with_fewer_micro_batches_than_stages(p: int, m: int) -> None:
    schedules: list[Schedule] = [build(name, p, m) for name in ScheduleName]
    for schedule in (*schedules, forward_only(p, m)):
        assert schedule.problems() == ()
        assert len(schedule.ranks) == schedule.stages == p


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_in_flight_micro_batches_are_m_for_gpipe_and_at_most_p_minus_rank_for_1f1b(p: int, m: int) -> None:
    assert [gpipe(p, m).in_flight(rank) for rank in range(p)] == [m] * p
    assert [one_f_one_b(p, m).in_flight(rank) for rank in range(p)] == [min(m, p - rank) for rank in range(p)]


def test_forwards_alone_hold_nothing() -> None:
    schedule = forward_only(3, 5)
    assert not schedule.trains
    assert [schedule.in_flight(rank) for rank in range(3)] == [0, 0, 0]


def test_1f1b_is_the_figure_of_the_paper() -> None:
    rows = [" ".join(str(op)[:2] for op in ops) for ops in one_f_one_b(4, 4).ranks]
    assert rows == [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize("name", ScheduleName)
def test_a_schedule_is_built_by_its_name(name: ScheduleName) -> None:
    assert build(name, 2, 2).name == str(name)
