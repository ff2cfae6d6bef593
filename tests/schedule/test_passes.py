"""The lowered programs: their text in small cases."""

from __future__ import annotations

import pytest

from meshwright.layout.layout import Layout
from meshwright.schedule.catalog import forward_only, gpipe, one_f_one_b
from meshwright.schedule.cut import Cut, Tie
from meshwright.schedule.op import Op
from meshwright.schedule.passes import gathered, lower, prefetched
from meshwright.schedule.program import (
    Backward,
    Forward,
)
from meshwright.schedule.schedule import Schedule


def text_of(schedule: Schedule, rank: int, cut: Cut, layout: str = "dp2") -> str:
    return "  ".join(map(str, lower(schedule, rank, cut, Layout.parse(layout)).actions))


def test_a_middle_stage_receives_before_and_sends_after_its_layers() -> None:
    assert text_of(one_f_one_b(3, 1), 1, Cut((0, 1, 3, 4))) == (
        "RECV F0@0 from 0  F0@1.1  F0@1.2  SEND F0@1 to 2  "
        "RECV B0@2 from 2  B0@1.2  REDUCE 2  B0@1.1  REDUCE 1  SEND B0@1 to 0  STEP"
    )


def test_the_first_recompute_stands_before_the_wait_for_the_gradient() -> None:
    assert text_of(gpipe(2, 1), 0, Cut((0, 2, 3)), "recompute-full") == (
        "F0@0.0  F0@0.1  SEND F0@0 to 1  R0@0.1  RECV B0@1 from 1  B0@0.1  REDUCE 1  R0@0.0  B0@0.0  REDUCE 0  STEP"
    )


def test_zero_3_gathers_for_each_use_and_once_for_a_recompute_and_its_backward() -> None:
    cut = Cut((0, 1))
    assert text_of(gpipe(1, 1), 0, cut, "dp2/zero3") == (
        "GATHER 0  F0@0.0  RELEASE 0  GATHER 0  B0@0.0  RELEASE 0  REDUCE 0  STEP"
    )
    assert text_of(gpipe(1, 1), 0, cut, "dp2/zero3/recompute-full") == (
        "GATHER 0  F0@0.0  RELEASE 0  GATHER 0  R0@0.0  B0@0.0  RELEASE 0  REDUCE 0  STEP"
    )


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (0, "F0@0.0  B0@0.0  F1@0.0  B1@0.0  REDUCE 0  STEP"),
        (1, "F0@0.0  B0@0.0  F1@0.0  B1@0.0  REDUCE 0  STEP  GATHER 0"),
        (2, "F0@0.0  B0@0.0  REDUCE 0  F1@0.0  B1@0.0  REDUCE 0  STEP  GATHER 0"),
    ],
)
def test_the_zero_stage_decides_when_gradients_are_reduced_and_weights_gathered(zero: int, expected: str) -> None:
    assert text_of(one_f_one_b(1, 2), 0, Cut((0, 1)), f"dp2/zero{zero}") == expected


def test_a_tie_is_reduced_after_its_last_use_and_summed_over_its_stages() -> None:
    tie = (Tie("tied", (0, 2)),)
    assert text_of(gpipe(1, 1), 0, Cut((0, 3), tie)) == (
        "F0@0.0  F0@0.1  F0@0.2  B0@0.2  REDUCE 2  B0@0.1  REDUCE 1  B0@0.0  REDUCE 0  REDUCE tied  STEP"
    )
    split = Cut((0, 2, 3), tie)
    assert text_of(gpipe(2, 1), 0, split).endswith("TIE tied  STEP")
    assert text_of(gpipe(2, 1), 1, split, "dp2/zero1").endswith("TIE tied  STEP  GATHER 2  GATHER tied")


def test_a_stage_between_the_holders_of_a_tie_has_nothing_to_sum() -> None:
    assert "TIE" not in text_of(gpipe(3, 1), 1, Cut((0, 1, 2, 3), (Tie("tied", (0, 2)),)))


def test_evaluation_has_no_backward_no_reduction_and_no_step() -> None:
    cut = Cut((0, 1, 2), (Tie("tied", (0, 1)),))
    assert text_of(forward_only(2, 1), 1, cut, "recompute-full") == "RECV F0@0 from 0  F0@1.1"
    assert text_of(forward_only(2, 1), 0, cut, "dp2/zero3") == (
        "GATHER 0  GATHER tied  F0@0.0  RELEASE 0  RELEASE tied  SEND F0@0 to 1"
    )


def test_a_cut_for_other_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="the cut has 1 stages and the schedule 2"):
        lower(gpipe(2, 1), 0, Cut((0, 1)), Layout())


def test_over_one_rank_nothing_is_gathered_whatever_the_layout_asks_for() -> None:
    for layout in ("zero3", "dp2/zero3/shard1"):
        assert text_of(gpipe(1, 1), 0, Cut((0, 1)), layout) == "F0@0.0  B0@0.0  REDUCE 0  STEP"


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (
            "dp4/zero1/shard2",
            "F0@0.0  F0@0.1  B0@0.1  B0@0.0  F1@0.0  F1@0.1  "
            "B1@0.1  REDUCE 1  B1@0.0  SYNC 1  REDUCE 0  SYNC 0  STEP  GATHER 0  GATHER 1",
        ),
        (
            "dp4/zero2/shard2",
            "F0@0.0  F0@0.1  B0@0.1  REDUCE 1  B0@0.0  REDUCE 0  F1@0.0  F1@0.1  "
            "B1@0.1  REDUCE 1  B1@0.0  SYNC 1  REDUCE 0  SYNC 0  STEP  GATHER 0  GATHER 1",
        ),
        (
            "dp4/zero0/shard2",
            "F0@0.0  F0@0.1  B0@0.1  B0@0.0  F1@0.0  F1@0.1  B1@0.1  REDUCE 1  B1@0.0  REDUCE 0  STEP",
        ),
    ],
)
def test_replicas_are_summed_once_per_step_while_the_next_layers_backward_goes_on(layout: str, expected: str) -> None:
    assert text_of(one_f_one_b(1, 2), 0, Cut((0, 2)), layout) == expected


def test_a_tie_is_summed_over_the_replicas_before_it_is_summed_over_the_stages() -> None:
    split = Cut((0, 1, 2), (Tie("tied", (0, 1)),))
    assert text_of(gpipe(2, 1), 1, split, "dp4/zero1/shard2").partition("B0@1.1  ")[2] == (
        "REDUCE 1  REDUCE tied  SEND B0@1 to 0  SYNC 1  SYNC tied  TIE tied  STEP  GATHER 1  GATHER tied"
    )


PREFETCHED = [
    "GATHER 0  F0@0.0  RELEASE 0  GATHER 1  F0@0.1  RELEASE 1  GATHER 2  F0@0.2  RELEASE 2  "
    "GATHER 2  B0@0.2  RELEASE 2  GATHER 1  B0@0.1  RELEASE 1  GATHER 0  B0@0.0  RELEASE 0",
    "GATHER 0  GATHER 1  F0@0.0  RELEASE 0  GATHER 2  F0@0.1  RELEASE 1  F0@0.2  RELEASE 2  "
    "GATHER 2  GATHER 1  B0@0.2  RELEASE 2  GATHER 0  B0@0.1  RELEASE 1  B0@0.0  RELEASE 0",
    "GATHER 0  GATHER 1  GATHER 2  F0@0.0  RELEASE 0  F0@0.1  RELEASE 1  GATHER 1  F0@0.2  RELEASE 2  "
    "GATHER 2  GATHER 0  B0@0.2  RELEASE 2  B0@0.1  RELEASE 1  B0@0.0  RELEASE 0",
]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_layer_is_on_its_way_while_those_before_it_compute(depth: int) -> None:
    actions = lower(gpipe(1, 1), 0, Cut((0, 3)), Layout()).actions
    computed = tuple(action for action in actions if isinstance(action, Forward | Backward))
    got = prefetched(gathered(computed, Cut((0, 3))), depth)
    assert "  ".join(map(str, got)) == PREFETCHED[depth]


def test_the_gather_before_a_recompute_is_prefetched_once_for_it_and_its_backward() -> None:
    text = text_of(gpipe(1, 1), 0, Cut((0, 2)), "dp2/zero3/recompute-full")
    assert text == (
        "GATHER 0  GATHER 1  F0@0.0  RELEASE 0  F0@0.1  RELEASE 1  GATHER 1  GATHER 0  R0@0.1  B0@0.1  RELEASE 1  "
        "REDUCE 1  R0@0.0  B0@0.0  RELEASE 0  REDUCE 0  STEP"
    )


def test_a_rank_with_several_stages_gets_the_actions_of_all() -> None:
    rows = ("F0@0 F0@2 B0@2 B0@0", "F0@1 F0@3 B0@3 B0@1")
    schedule = Schedule("loop", 4, 1, tuple(tuple(map(Op.parse, row.split())) for row in rows))
    assert text_of(schedule, 0, Cut((0, 1, 2, 3, 4), (Tie("tied", (0, 2)),)), "dp2/zero1") == (
        "F0@0.0  SEND F0@0 to 1  RECV F0@1 from 1  F0@2.2  SEND F0@2 to 1  "
        "RECV B0@3 from 1  B0@2.2  REDUCE 2  SEND B0@2 to 1  "
        "RECV B0@1 from 1  B0@0.0  REDUCE 0  REDUCE tied  STEP  GATHER 0  GATHER tied  GATHER 2"
    )
