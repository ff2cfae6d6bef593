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
    lambda runs, shard, **others: Layout(data=runs * max(shard, 1), shard=shard, **others),
    runs=sizes,
    tensor=sizes,
    pipeline=sizes,
    zero=st.sampled_from(ZeroStage),
    schedule=st.sampled_from(ScheduleName),
    micro_batches=sizes,
    recompute=st.sampled_from(Recompute),
    checkpoints=st.sampled_from(Checkpoints),
    shard=st.integers(0, 64),
    prefetch=st.integers(0, 8),
    offload=st.booleans(),
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


@pytest.mark.parametrize(
    ("text", "remedy"),
    [("dp6/zero1/shard4", "dp=6; try shard=3 or 6"), ("dp2/zero1/shard4", "dp=2; try shard=2")],
)
def test_the_runs_of_shards_must_divide_the_data_ranks(text: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"shard=4 does not divide {remedy}"):
        Layout.parse(text)
    assert Layout.parse(text.replace("shard4", "shard2")).shards == 2


def test_the_text_says_everything_but_what_is_usual() -> None:
    assert str(Layout()) == "dp1.tp1.pp1/zero0/1f1b/m1"
    full = Layout(data=2, tensor=2, pipeline=4, zero=1, micro_batches=8, recompute="full")
    assert str(full) == "dp2.tp2.pp4/zero1/1f1b/m8/recompute-full"
    assert full.recompute is Recompute.FULL
    assert full.zero is ZeroStage.OPTIMIZER
    rare = Layout(data=8, zero=3, shard=4, prefetch=2, offload=True)
    assert str(rare) == "dp8.tp1.pp1/zero3/shard4/prefetch2/offload/1f1b/m1"


def test_parts_left_out_have_their_defaults() -> None:
    assert Layout.parse("pp2/m4") == Layout(pipeline=2, micro_batches=4)
    assert Layout.parse("gpipe") == Layout(schedule=ScheduleName.GPIPE)


@pytest.mark.parametrize(
    ("text", "shards", "replicas"),
    [("dp8/zero1", 8, 1), ("dp8/zero1/shard2", 2, 4), ("dp8/zero3/shard8", 8, 1), ("dp1/zero3", 1, 1)],
)
def test_states_are_divided_over_a_run_of_ranks_and_every_run_is_a_replica(
    text: str, shards: int, replicas: int
) -> None:
    layout = Layout.parse(text)
    assert (layout.shards, layout.replicas) == (shards, replicas)
    assert layout.effective_zero is (layout.zero if shards > 1 else ZeroStage.NONE)


@pytest.mark.parametrize("text", ["dp8/zero0/shard2", "dp8/zero3/shard1", "dp8/zero0"])
def test_where_nothing_is_divided_all_data_ranks_are_one_run(text: str) -> None:
    layout = Layout.parse(text)
    assert layout.effective_zero is ZeroStage.NONE
    assert (layout.shards, layout.replicas) == (8, 1)


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
        ("dp2/shard0", "shard0", "shard1"),
        ("dp2/shards4", "shards4", "shard4"),
        ("dp2/prefech0", "prefech0", "prefetch0"),
        ("dp2/prefetch", "prefetch", "prefetch1"),
        ("dp2/ofload", "ofload", "offload"),
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


@pytest.mark.parametrize(
    "text", ["dp2.tp2.dp4", "zero1/zero1", "gpipe/1f1b", "m2/m4", "offload/offload", "shard2/shard4"]
)
def test_a_part_said_twice_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="again after"):
        Layout.parse(text)


def test_values_that_no_layout_has_are_refused() -> None:
    with pytest.raises(ValueError, match="micro_batches=0 is not a size"):
        Layout(micro_batches=0)
    with pytest.raises(ValueError, match="shard=-1 is not a size; the nearest that works is shard=0"):
        Layout(shard=-1)
    with pytest.raises(ValueError, match="prefetch=-2 is not a size; the nearest that works is prefetch=0"):
        Layout(prefetch=-2)
    with pytest.raises(ValueError, match="no ZeRO stage 4; take 0, 1, 2 or 3"):
        Layout(zero=4)
    with pytest.raises(ValueError, match='nearest is "gpipe"'):
        Layout(schedule="gpip")
