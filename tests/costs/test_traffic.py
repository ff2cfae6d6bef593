"""What data parallelism sends, in the papers' words."""

from __future__ import annotations

from fractions import Fraction

import pytest

from meshwright.costs.traffic import Traffic, data_parallel, of_layout
from meshwright.layout.layout import Layout
from meshwright.layout.zero import ZeroStage


@pytest.mark.parametrize("d", [1, 2, 4, 64])
def test_every_stage_sends_what_the_zero_paper_says(d: int) -> None:
    psi = 1000
    part = Fraction(d - 1, d)
    volumes = [data_parallel(psi, d, stage) for stage in ZeroStage]
    assert volumes == [2 * psi * part, 2 * psi * part, 2 * psi * part, 3 * psi * part]


def test_with_more_micro_batches_stages_2_and_3_reduce_and_3_gathers_each_time() -> None:
    volumes = [data_parallel(1, 2, stage, micro_batches=8) * 2 for stage in ZeroStage]
    assert volumes == [2, 2, 8 + 1, 3 * 8]


@pytest.mark.parametrize(
    ("layout", "shards", "replicas"),
    [
        # Ψ = 96. Two runs of four: (1 + 1) 96 3/4 inside, an all-reduce of the own 24 between two replicas.
        ("dp8/zero1/shard4", 144, 24),
        ("dp8/zero2/shard4", 144, 24),
        ("dp8/zero3/shard4", 216, 24),
        # Four runs of two: (1 + 1) 96 1/2 inside, an all-reduce of the own 48 between four.
        ("dp8/zero1/shard2", 96, 72),
        ("dp8/zero3/shard2", 144, 72),
        # More micro-batches reduce and gather more often inside; the replicas still meet once.
        ("dp8/zero2/shard4/m3", 4 * 72, 24),
        ("dp8/zero3/shard4/m3", 9 * 72, 24),
    ],
)
def test_runs_of_shards_send_inside_and_replicas_once_per_step(layout: str, shards: int, replicas: int) -> None:
    assert of_layout(96, Layout.parse(layout)) == Traffic(Fraction(shards), Fraction(replicas))


@pytest.mark.parametrize("zero", ZeroStage)
@pytest.mark.parametrize("suffix", ["", "/shard8", "/shard8/prefetch3/offload"])
def test_one_run_of_all_ranks_sends_what_zero_sends(zero: ZeroStage, suffix: str) -> None:
    layout = Layout.parse(f"dp8/zero{int(zero)}/m2{suffix}")
    assert of_layout(96, layout) == Traffic(data_parallel(96, 8, zero, 2), Fraction(0))


def test_where_nothing_is_divided_a_shard_changes_nothing() -> None:
    plain = data_parallel(96, 8, ZeroStage.NONE)
    for layout in ("dp8/zero0/shard4", "dp8/zero3/shard1"):
        assert of_layout(96, Layout.parse(layout)) == Traffic(plain, Fraction(0))


@pytest.mark.parametrize("shard", [2, 4, 8, 16])
def test_stages_1_and_2_send_as_much_in_all_however_long_the_runs_are(shard: int) -> None:
    # A hierarchical all-reduce: (s-1)/s + (r-1)/(r s) = (d-1)/d. Only where it is sent changes.
    for zero in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS):
        assert of_layout(96, Layout(data=16, zero=zero, shard=shard)).total == data_parallel(96, 16, zero)
