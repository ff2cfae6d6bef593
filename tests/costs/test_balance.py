"""The balanced cut: exact, never an empty part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.costs.balance import balance


def loads(costs: Sequence[float], bounds: tuple[int, ...]) -> list[float]:
    return [sum(costs[low:high]) for low, high in pairwise(bounds)]


def sizes(bounds: tuple[int, ...]) -> list[int]:
    return [high - low for low, high in pairwise(bounds)]


def brute_force(costs: Sequence[int], parts: int) -> tuple[int, ...]:
    def badness(bounds: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        parts_of = loads(costs, bounds)
        return max(parts_of), sum(load * load for load in parts_of), bounds

    inner = combinations(range(1, len(costs)), parts - 1)
    return min(((0, *cuts, len(costs)) for cuts in inner), key=badness)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=9), st.data())
@settings(max_examples=150, deadline=None)
def test_the_cut_is_the_one_of_trying_all(costs: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    assert balance(costs, parts) == brute_force(costs, parts)


@given(st.lists(st.integers(0, 50).map(lambda tenths: tenths / 10), min_size=1, max_size=40), st.data())
@settings(max_examples=40, deadline=None)
def test_no_part_is_empty_and_no_layer_lost(costs: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    bounds = balance(costs, parts)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(costs), parts + 1)
    assert min(sizes(bounds)) >= 1


def test_thirty_layers_on_four_stages_are_all_built_once() -> None:
    # Megatron-LM, issues 1304 and 1778: 28 layers were built.
    assert sizes(balance([1.0] * 30, 4)) == [7, 7, 8, 8]


def test_five_equal_layers_on_four_stages_leave_none_empty() -> None:
    # DeepSpeed, pull request 4312: [2, 2, 1, 0] has the same maximum.
    assert sorted(sizes(balance([1] * 5, 4))) == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("costs", "parts", "heaviest"),
    [
        ([17, 6, 1, 16, 7, 7, 3, 13, 20, 8], 5, 24),
        ([9, 9, 18, 17], 3, 18),
        ([13, 15, 1, 1, 13], 3, 15),
        ([1] * 30, 4, 8),
    ],
)
def test_the_heaviest_part_is_as_light_as_it_can_be(costs: list[int], parts: int, heaviest: int) -> None:
    # The costs on which the partitioners of other projects differ.
    bounds = balance(costs, parts)
    assert max(loads(costs, bounds)) == heaviest
    assert bounds == brute_force(costs, parts)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (5, 0), (0, 7), (10, 10)])
def test_layers_without_cost_never_fill_a_stage_alone(before: int, after: int) -> None:
    # DeepSpeed, issue 5078: layers without parameters around 42 equal ones, 16 stages.
    costs = [0] * before + [1] * 42 + [0] * after
    assert min(loads(costs, balance(costs, 16))) >= 1


@pytest.mark.parametrize("parts", [0, 4])
def test_more_stages_than_layers_are_an_error_that_names_both(parts: int) -> None:
    with pytest.raises(ValueError, match=f"3 layers cannot be cut into {parts} stages .* take 1 to 3"):
        balance([1, 1, 1], parts)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_is_none_is_named(cost: float) -> None:
    with pytest.raises(ValueError, match="layer 1 costs"):
        balance([1.0, cost], 1)


def test_equal_floats_balance_like_equal_ints() -> None:
    assert balance([0.1] * 10, 3) == balance([1] * 10, 3)
