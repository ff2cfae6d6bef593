"""The cut of layers into stages, and its units."""

from __future__ import annotations

import pytest

from meshwright.schedule.cut import Cut, Tie

CUT = Cut((0, 2, 5, 6), (Tie("tied", (0, 5)), Tie("shared", (2, 3))))


def test_every_layer_stands_on_the_stage_that_lists_it() -> None:
    assert CUT.stages == 3
    assert [list(CUT.layers(stage)) for stage in range(3)] == [[0, 1], [2, 3, 4], [5]]
    assert [CUT.stage_of(layer) for layer in range(6)] == [0, 0, 1, 1, 1, 2]


def test_a_layer_needs_its_own_unit_and_its_ties() -> None:
    assert [CUT.units(layer) for layer in (0, 1, 3)] == [("0", "tied"), ("1",), ("3", "shared")]


def test_a_stage_has_each_unit_once() -> None:
    assert [CUT.units_of(stage) for stage in range(3)] == [("0", "tied", "1"), ("2", "shared", "3", "4"), ("5", "tied")]


def test_a_tie_knows_the_stages_that_hold_it() -> None:
    assert [CUT.tie_stages(tie) for tie in CUT.ties] == [(0, 2), (1,)]


@pytest.mark.parametrize("bounds", [(), (0,), (1, 2), (0, 2, 2), (0, 3, 2)])
def test_a_stage_without_layers_is_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="each stage at least one layer"):
        Cut(bounds)


@pytest.mark.parametrize(
    ("ties", "message"),
    [
        ((Tie("7", (0,)),), "cannot name a tie"),
        ((Tie("two words", (0,)),), "cannot name a tie"),
        ((Tie("tied", (0, 9)),), r"used by layers \(0, 9\); there are layers 0 to 1"),
        ((Tie("tied", ()),), "used by layers"),
        ((Tie("tied", (0,)), Tie("tied", (1,))), "two ties have one name"),
    ],
)
def test_a_tie_that_is_none_is_refused(ties: tuple[Tie, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cut((0, 1, 2), ties)


def test_a_layer_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="there is no layer 6; there are layers 0 to 5"):
        CUT.stage_of(6)
