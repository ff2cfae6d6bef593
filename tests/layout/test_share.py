"""Every sample of a step belongs to exactly one micro-batch of one data rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwright.layout.layout import Layout
from meshwright.layout.share import evenly, micro_batch_samples


@given(st.integers(0, 60), st.integers(1, 8), st.integers(1, 8))
def test_every_sample_is_in_one_micro_batch_and_sizes_differ_by_at_most_one(batch: int, data: int, m: int) -> None:
    layout = Layout(data=data, micro_batches=m)
    parts = [part for rank in range(data) for part in micro_batch_samples(batch, layout, rank)]
    assert [sample for part in parts for sample in part] == list(range(batch))
    for rank in range(data):
        sizes = [len(part) for part in micro_batch_samples(batch, layout, rank)]
        assert len(sizes) == m
        assert max(sizes) - min(sizes) <= 1


def test_the_longer_shares_come_first() -> None:
    assert evenly(range(10), 4) == (range(3), range(3, 6), range(6, 8), range(8, 10))
