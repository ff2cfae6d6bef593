"""The description of a model refuses what cannot be built."""

from __future__ import annotations

import pytest

from meshwright.costs.spec import GPTSpec


def test_heads_share_the_width() -> None:
    assert GPTSpec(hidden=96, heads=6).head_size == 16


def test_heads_that_do_not_divide_the_width_are_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="heads=5 does not divide hidden=128; try heads=4 or 8"):
        GPTSpec(hidden=128, heads=5)


@pytest.mark.parametrize("name", ["layers", "hidden", "heads", "sequence", "vocabulary"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 is not a size"):
        GPTSpec(**{name: 0})


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan")])
def test_a_dropout_that_is_no_probability_below_one_is_refused(dropout: float) -> None:
    with pytest.raises(ValueError, match="is not a probability below 1"):
        GPTSpec(dropout=dropout)
