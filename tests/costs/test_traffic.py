"""What data parallelism sends, in the papers' words."""

from __future__ import annotations

from fractions import Fraction

import pytest

from meshwright.costs.traffic import data_parallel
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
