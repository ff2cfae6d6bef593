"""Which samples of a step belong to which data rank and micro-batch.

    batch of 10, d = 2, m = 2     samples  0 1 2 3 4 │ 5 6 7 8 9
                                  rank 0: [0 1 2] [3 4]   rank 1: [5 6 7] [8 9]

Nothing has to divide anything: shares differ by at most one sample, and a micro-batch may be empty. As the loss is a
sum over tokens divided by the tokens of the whole batch, uneven shares change no number.
"""

from __future__ import annotations

from itertools import pairwise

from meshwright.layout.layout import Layout


def evenly(samples: range, parts: int) -> tuple[range, ...]:
    """`samples` in `parts` consecutive ranges whose lengths differ by at most one, the longer first."""
    size, longer = divmod(len(samples), parts)
    bounds = [part * size + min(part, longer) for part in range(parts + 1)]
    return tuple(samples[low:high] for low, high in pairwise(bounds))


def micro_batch_samples(batch: int, layout: Layout, data_rank: int) -> tuple[range, ...]:
    """The numbers (0 to batch-1) of the samples of each of the m micro-batches of one data rank."""
    return evenly(evenly(range(batch), layout.data)[data_rank], layout.micro_batches)
