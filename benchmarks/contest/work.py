"""What every system computes: a size of GPT, a batch of tokens, a dtype, and how often the weights change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from meshwright.costs.spec import GPTSpec

SIZES = {
    "17m": GPTSpec(layers=6, hidden=384, heads=6, sequence=256, vocabulary=8192, tied=False),
    "98m": GPTSpec(layers=12, hidden=768, heads=12, sequence=256, vocabulary=8192, tied=False),
}
"""The models by their size, which counts both the embedding and the projection onto the vocabulary."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

RANKS = 2
"""Processes of a data-parallel system; each has one thread, and one process alone has as many threads."""

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.1
"""Of every parameter, so that no system needs more than one group of them."""

SEED = 1


@dataclass(frozen=True)
class Batch:
    """Token numbers and what follows each: (b, s) int64 both."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Work:
    """The same for all systems of a contest."""

    size: str
    dtype: str
    samples: int = 8

    @property
    def spec(self) -> GPTSpec:
        """The model."""
        return SIZES[self.size]

    @property
    def bf16(self) -> bool:
        """Whether matrices are multiplied in 16 bits."""
        return DTYPES[self.dtype] is torch.bfloat16

    @property
    def tokens(self) -> int:
        """Tokens of one step, of all ranks together."""
        return self.samples * self.spec.sequence


@dataclass(frozen=True)
class Seat:
    """One process of a system: its rank, how many there are, and a file in which they may meet.

    `port` is for a system that can only meet on a network.
    """

    work: Work
    rank: int
    ranks: int
    meeting: str
    port: int = field(default=0)

    def batches(self) -> Iterator[Batch]:
        """This rank's share of one batch after another; the shares of all ranks make the same batch in every system."""
        share = self.work.samples // self.ranks
        own = slice(self.rank * share, (self.rank + 1) * share)
        for step in count():
            generator = torch.Generator().manual_seed(step)
            shape = (self.work.samples, self.work.spec.sequence + 1)
            text = torch.randint(self.work.spec.vocabulary, shape, generator=generator)[own]
            yield Batch(text[:, :-1].contiguous(), text[:, 1:].contiguous())
