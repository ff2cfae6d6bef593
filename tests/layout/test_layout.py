"""The layout and its text form."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.layout.layout import Checkpoints, Layout, Recompute, ScheduleName
from meshwright.layout.mesh import Mesh
from meshwright.layout.zero import ZeroStage

sizes = st.integers(1, 4096)
layouts = st.builds(
    Layout,
    data=sizes,
    tensor=sizes,
    pipeline=sizes,
    zero=st.sampled_from(ZeroStage),
    schedule=st.sampled_from(ScheduleName),
    micro_batches=sizes,
    recompute=st.sampled_from(Recompute),
    checkpoints=st.sampled_from(Checkpoints),
)


@given(layouts)
@settings(max_examples=60, deadline=None)
def test_a_layout_reads_back_from_its_text(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@given(layouts, st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_the_parts_may_stand_in_any_order(layout: Layout, order: random.Random) -> None:
    parts = str(layout).replace(".", "/").split("/")
    order.shuffle(parts)
    assert Layout.parse("/".join(parts)) == layout


def test_the_text_says_everything_but_no_recompute() -> None:
    assert str(Layout()) == "dp1.tp1.pp1/zero0/1f1b/m1"
    full = Layout(data=2, tensor=2, pipeline=4, zero=1, micro_batches=8, recompute="full")
    assert str(full) == "dp2.tp2.pp4/zero1/1f1b/m8/recompute-full"
    assert full.recompute is Recompute.FULL
    assert full.zero is ZeroStage.OPTIMIZER


def test_parts_left_out_have_their_defaults() -> None:
    assert Layout.parse("pp2/m4") == Layout(pipeline=2, micro_batches=4)
    assert Layout.parse("gpipe") == Layout(schedule=ScheduleName.GPIPE)


def test_a_layout_has_a_mesh_of_all_its_ranks() -> None:
    layout = Layout(data=2, tensor=3, pipeline=4)
    assert layout.mesh == Mesh(data=2, pipeline=4, tensor=3)
    assert layout.ranks == 24


@pytest.mark.parametrize(
    ("text", "part", "nearest"),
    [
        ("dp2.tp2/zeo1", "zeo1", "zero1"),
        ("dp2/zero7", "zero7", "zero3"),
        ("d4.tp2", "d4", "dp4"),
        ("tp0", "tp0", "tp1"),
        ("dp2/1b1f/m8", "1b1f", "1f1b"),
        ("dp2/g-pipe", "g-pipe", "gpipe"),
        ("dp2/recompute", "recompute", "recompute-none"),
        ("DP2", "DP2", "dp2"),
        ("dp-2", "dp-2", "dp2"),
    ],
)
def test_an_unknown_part_is_named_beside_the_nearest(text: str, part: str, nearest: str) -> None:
    with pytest.raises(ValueError, match="is not a part") as caught:
        Layout.parse(text)
    assert f'"{part}" is not' in str(caught.value)
    assert f'nearest is "{nearest}"' in str(caught.value)
    assert Layout.parse("dp2.tp2.pp4/zero1/1f1b/m8")
    assert "dp2.tp2.pp4/zero1/1f1b/m8" in str(caught.value)


@pytest.mark.parametrize("text", ["", "dp2//m4", "dp2.tp2/"])
def test_an_empty_part_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="has an empty part"):
        Layout.parse(text)


@pytest.mark.parametrize("text", ["dp2.tp2.dp4", "zero1/zero1", "gpipe/1f1b", "m2/m4"])
def test_a_part_said_twice_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="again after"):
        Layout.parse(text)


def test_values_that_no_layout_has_are_refused() -> None:
    with pytest.raises(ValueError, match="micro_batches=0 is not a size"):
        Layout(micro_batches=0)
    with pytest.raises(ValueError, match="no ZeRO stage 4; take 0, 1, 2 or 3"):
        Layout(zero=4)
    with pytest.raises(ValueError, match='nearest is "gpipe"'):
        Layout(schedule="gpip")
