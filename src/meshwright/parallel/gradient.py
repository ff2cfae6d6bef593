"""The gradient of one ZeRO unit on one rank: whole while backward passes add to it, then this rank's part of the sum.

      open ── backward adds ──► start_reduce ── sum over the shards ──► finish_reduce ── sum over replicas ──► owned

Under stages 0 and 1 the whole gradient persists between the micro-batches of a step, and is reduced where it lies;
under 2 and 3 it exists from a unit's backward pass to the end of its reduction, in a buffer of the pool, and only the
shard persists (ZeRO, section 5.2). The sum may be taken in a wider dtype than the gradient has: then a second buffer of
the pool carries it. When the whole is to be reduced is the program's business (`schedule.passes`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.comm.group import Handle
from meshwright.parallel.pool import GradientPool
from meshwright.parallel.setting import Setting


class Gradient:
    """The gradient of a unit of `numel` elements, padding included, which the ranks of `setting.shards` divide."""

    def __init__(self, numel: int, setting: Setting, pool: GradientPool) -> None:
        self._shards = setting.shards
        self._replicas = setting.replicas
        self._sharding = setting.sharding
        self._precision = setting.precision
        self.pool = pool
        self._numel = numel
        self._begin = setting.shards.index * (numel // setting.shards.size)
        self._open: Tensor | None = None
        if self._sharding.gradients:
            shard = numel // setting.shards.size
            self._sum = torch.zeros(shard, dtype=self._precision.reduce, device=setting.device)
        else:
            self._sum = self._open = setting.shards.buffer(numel, self._precision.compute, setting.device).zero_()
        self._taken: list[Tensor] = []
        self._source: Tensor | None = None
        self._reducing: Handle | None = None
        self._syncing: Handle | None = None
        self._trace: Tensor | None = None

    # --- backward passes -----------------------------------------------------------------------------------------

    def open(self) -> Tensor:
        """The whole gradient, 1-D with padding, for a backward pass to add to; it begins at zero if it did not persist.

        Waits for a reduction that still reads it.
        """
        self.finish_reduce()
        if self._open is None:
            self._open = self._take(self._precision.compute).zero_()
        return self._open

    def _take(self, dtype: torch.dtype) -> Tensor:
        self._taken.append(self.pool.take(dtype))
        return self._taken[-1][: self._numel]

    @property
    def is_open(self) -> bool:
        """Whether there is a whole gradient."""
        return self._open is not None

    # --- reductions ------------------------------------------------------------------------------------------------

    def start_reduce(self) -> None:
        """Begin to sum the gradient over the shards: all of it in stage 0, else each rank's part of it."""
        assert self._open is not None, "no backward pass has left a gradient to reduce"
        # Over all reductions of a step: nothing finite can make up for what is not.
        self._trace = trace(self._open) if self._trace is None else self._trace + trace(self._open)
        source = self._open
        if self._precision.reduce != self._precision.compute:
            source = self._take(self._precision.reduce).copy_(self._open)
        self._source = source
        if self._sharding.optimizer:
            self._reducing = self._shards.start_reduce_scatter(source, self._own(source), label="gradients")
        else:
            self._reducing = self._shards.start_all_reduce(source, label="gradients")

    def finish_reduce(self) -> None:
        """Wait for the reduction under way, if any; afterwards `owned` is the sum.

        Stages 2 and 3 add it to the sum over the micro-batches, and give the whole one back.
        """
        if self._reducing is None:
            return
        self._reducing.wait()
        self._reducing = None
        assert self._source is not None
        if self._sharding.gradients:
            self._sum.add_(self._own(self._source))
            self._open = None
        elif self._source is not self._open:
            self.owned.copy_(self._own(self._source) if self._sharding.optimizer else self._source)
        self._source = None
        while self._taken:
            self.pool.give(self._taken.pop())

    def start_sync(self) -> None:
        """Begin to sum what this rank owns over the replicas (HSDP); the reduction must have ended."""
        assert self._reducing is None, "the gradient is still being reduced over the shards"
        self._syncing = self._replicas.start_all_reduce(self.owned, label="replicas")

    def finish_sync(self) -> None:
        """Wait for the sum over the replicas, if one is under way."""
        if self._syncing is not None:
            self._syncing.wait()
            self._syncing = None

    def clear(self) -> None:
        """Start the next step's sum at zero."""
        self._sum.zero_()
        self._trace = None

    def discard(self) -> None:
        """Forget everything since the last `clear`, also what an error has left half done."""
        self.finish_reduce()
        if self._sharding.gradients:
            self._open = None
            while self._taken:
                self.pool.give(self._taken.pop())
        self.clear()
        self._trace = None

    # --- what is there -----------------------------------------------------------------------------------------------

    @property
    def owned(self) -> Tensor:
        """The summed gradient of what this rank's optimizer updates, 1-D."""
        if self._sharding.gradients or not self._sharding.optimizer:
            return self._sum
        return self._own(self._sum)

    @property
    def finite_here(self) -> bool:
        """Whether this rank's own contributions since `clear` were finite."""
        return self._trace is None or bool(self._trace.isfinite())

    @property
    def held_bytes(self) -> int:
        """Bytes that persist between steps."""
        return self._sum.numel() * self._sum.element_size()

    def _own(self, whole: Tensor) -> Tensor:
        return whole[self._begin : self._begin + self._numel // self._shards.size]


def trace(flat: Tensor) -> Tensor:
    """A number that is finite if all elements of `flat` are, in one quick pass, and without waiting for a GPU."""
    if flat.dtype is not torch.float16:
        return flat.sum()
    # A sum of finite float16 numbers can overflow, so it is taken in float32, piece by piece: torch widens a copy.
    return torch.stack([part.sum(dtype=torch.float32) for part in torch.split(flat, 2**18)]).sum()
