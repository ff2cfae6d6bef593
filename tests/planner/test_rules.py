"""What is wrong with a layout, and what it costs, each with numbers and a remedy that works."""

from __future__ import annotations

import pytest

from meshwright.costs.spec import GPTSpec
from meshwright.layout.layout import Layout
from meshwright.planner.rules import problems, warnings

SPEC = GPTSpec(layers=6, hidden=96, heads=12)


def said(layout: str, batch: int = 16, ranks: int | None = None, spec: GPTSpec = SPEC) -> list[str]:
    return [str(problem) for problem in problems(Layout.parse(layout), spec, batch, ranks)]


def warned(layout: str, batch: int = 16) -> list[str]:
    return [str(problem) for problem in warnings(Layout.parse(layout), SPEC, batch)]


@pytest.mark.parametrize(
    "layout",
    [
        "dp1",
        "dp2.tp2.pp4/zero3/gpipe/m8/recompute-full",
        "tp12.pp8/m8",
        "dp3/m5",
        "dp4.tp2/zero3/shard2/prefetch4/offload",
        "dp4/zero0/shard2/offload",
        "offload",
    ],
)
def test_whatever_arithmetic_allows_is_legal(layout: str) -> None:
    assert said(layout) == []


def test_tensor_parallelism_must_divide_the_heads() -> None:
    assert said("tp5") == ["tp=5 does not divide 12 heads; try tp=4 or 6"]
    assert said("tp24") == ["tp=24 does not divide 12 heads; try tp=12"]


def test_there_are_at_most_as_many_stages_as_layers() -> None:
    (problem,) = said("pp9/m9")
    assert problem.startswith("pp=9 stages are more than 8 layers (6 blocks, the embedding and the head)")
    assert problem.endswith("try pp=8 or fewer")
    assert said("pp8/m8") == []


def test_a_batch_of_nothing_is_refused() -> None:
    assert said("dp1", batch=0) == ["a batch of 0 samples has nothing to train on; try batch=1 or more"]


def test_the_ranks_must_be_those_that_there_are() -> None:
    assert said("dp2.tp2.pp2", ranks=8) == []
    assert said("dp2.tp2.pp2", ranks=4) == ["dp=2 x tp=2 x pp=2 = 8 ranks, but there are 4; try dp=1, or start 8 ranks"]
    assert said("dp2.tp2.pp2", ranks=6) == [
        "dp=2 x tp=2 x pp=2 = 8 ranks, but there are 6;"
        " start 8 ranks, or try a tp and a pp whose product divides 6 instead of 4"
    ]


def test_every_problem_is_reported_at_once() -> None:
    assert len(said("dp2.tp5.pp9/m9", batch=0, ranks=1)) == 4


def test_a_layout_that_costs_nothing_extra_is_not_warned_about() -> None:
    assert warned("dp2.tp2.pp4/zero1/1f1b/m8") == []
    assert warned("dp2/zero3/m1") == []


def test_fewer_micro_batches_than_stages_are_legal_and_warned_about_with_the_bubble() -> None:
    assert said("pp4/m2") == []
    assert warned("pp4/m2") == [
        "m=2 micro-batches do not fill pp=4 stages: 60.0% of the time is bubble; try m=16, where it is 15.8%"
    ]


def test_an_uneven_batch_is_legal_and_warned_about_with_the_nearest_even_ones() -> None:
    assert said("dp2/m4", batch=10) == []
    assert warned("dp2/m4", batch=10) == [
        "batch=10 over dp=2 x m=4 = 8 micro-batches is uneven: 2 of 2 samples and 6 of 1; try batch=8 or 16"
    ]


def test_a_batch_smaller_than_its_micro_batches_leaves_some_empty() -> None:
    assert said("dp2/m4", batch=3) == []
    assert warned("dp2/m4", batch=3) == [
        "batch=3 over dp=2 x m=4 = 8 micro-batches leaves 5 of them empty; try batch=8"
    ]


def test_zero_without_data_parallelism_is_warned_about() -> None:
    assert warned("zero2/m2") == ["zero=2 has nothing to divide over: dp=1; try zero=0, or dp=2 and more"]


def test_the_gathers_of_zero_3_are_warned_about_with_their_number() -> None:
    assert warned("dp4/zero3/m4") == [
        "zero=3 gathers every parameter 2 x m = 8 times a step: a rank sends 9 elements per parameter;"
        " zero=2 sends 3.75, zero=1 1.5; fewer micro-batches cost less"
    ]


def test_the_gathers_of_runs_of_shards_are_counted_with_the_sum_over_their_replicas() -> None:
    # 3 m (s-1)/s = 6 and an all-reduce of a half over two replicas, 1/2; zero=2 sends 2.5 + 1/2.
    assert warned("dp4/zero3/shard2/m4") == [
        "zero=3 gathers every parameter 2 x m = 8 times a step: a rank sends 6.5 elements per parameter;"
        " zero=2 sends 3, zero=1 1.5; fewer micro-batches cost less"
    ]


def test_parts_that_the_zero_stage_makes_no_use_of_are_warned_about() -> None:
    assert warned("dp4/zero0/shard2") == [
        "shard=2 has nothing to divide: zero=0 divides no states; try zero=1 or more",
    ]
    assert warned("dp4/zero3/shard1/m2") == [
        "shard=1 undoes zero=3: over one rank nothing is divided; try zero=0, or shard=2 and more",
    ]
    assert warned("dp4/zero1/prefetch2") == [
        "prefetch=2 has nothing to gather ahead: zero=1 holds the parameters whole; try zero=3, or leave it out",
    ]
    assert warned("dp4/zero3/shard2/prefetch2") == []


def test_offload_of_undivided_states_is_warned_about_with_what_dividing_them_saves() -> None:
    assert warned("dp4/zero0/offload") == [
        "offload without divided states: each of dp=4 ranks moves every gradient to its host and every parameter back,"
        " and holds all optimizer states there; zero=1 or more moves and holds 1/4 of it"
    ]
    assert warned("dp4/zero1/offload") == warned("offload") == []
