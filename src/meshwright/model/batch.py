"""One micro-batch, as every layer of every stage receives it: the tokens, what they should predict, and its noise.

Not where batches come from; that is `train.batches`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshwright.parallel.noise import Noise

IGNORED = -100
"""The target of a token that has no loss."""


@dataclass(frozen=True)
class MicroBatch:
    """The samples that pass through the pipeline together; there may be none (b = 0).

    Args:
        tokens: (b, s) int64.
        targets: (b, s) int64, `IGNORED` where there is no loss.
        noise: the randomness of these samples in training; None to evaluate without dropout.
        label_smoothing: the part of each target that is spread evenly over the vocabulary.
    """

    tokens: Tensor
    targets: Tensor
    noise: Noise | None = None
    label_smoothing: float = 0.0

    @property
    def token_count(self) -> int:
        """How many tokens have a loss."""
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        return replace(self, tokens=self.tokens.to(device), targets=self.targets.to(device))
