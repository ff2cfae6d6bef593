"""From the global index of a sample to the micro-batches of one data rank, the same samples whatever the layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.layout.layout import Layout
from meshwright.layout.share import micro_batch_samples
from meshwright.model.batch import MicroBatch
from meshwright.parallel.noise import Noise
from meshwright.train.config import Config

Window = Callable[[int], NDArray[np.uint8]]
"""The (s + 1) tokens of the sample with this global index."""


def training_batches(window: Window, config: Config, layout: Layout, data_rank: int, step: int) -> list[MicroBatch]:
    """The m micro-batches of `data_rank` in `step`: sample j of the step is window step x batch + j of the corpus."""
    return [
        micro_batch(
            [window(step * config.batch + sample) for sample in samples],
            config.model.sequence,
            Noise(config.seed, step, tuple(samples)),
            config.label_smoothing,
        )
        for samples in micro_batch_samples(config.batch, layout, data_rank)
    ]


def evaluation_batches(windows: NDArray[np.uint8], sequence: int, layout: Layout, data_rank: int) -> list[MicroBatch]:
    """The same division of held-out windows (E, s + 1), without noise."""
    return [
        micro_batch(list(windows[samples.start : samples.stop]), sequence, None, 0.0)
        for samples in micro_batch_samples(len(windows), layout, data_rank)
    ]


def micro_batch(
    windows: Sequence[NDArray[np.uint8]], sequence: int, noise: Noise | None, smoothing: float
) -> MicroBatch:
    """Each window of s + 1 tokens as s tokens and the s that follow them; (0, s) if there is no window."""
    stacked = np.stack(windows) if windows else np.zeros((0, sequence + 1))
    tokens = torch.from_numpy(stacked.astype(np.int64))
    return MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), noise, smoothing)
