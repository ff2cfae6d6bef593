"""Buffers for whole gradients on their way, used again and again: constant-size buffers (C_B of ZeRO-R, section 6.2).

Under stages 2 and 3 the whole gradient of a unit lives from its backward pass to the end of its reduction. As few are
under way at a time, a handful of buffers as large as the largest unit serve the whole model, however many units it has.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from meshwright.comm.group import Group


class GradientPool:
    """Buffers of `numel` elements that the data ranks take and give back in the same order."""

    def __init__(self, data: Group, numel: int, device: torch.device) -> None:
        self._data = data
        self._numel = numel
        self._device = device
        self._free: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        self.made = 0
        self.held_bytes = 0

    def take(self, dtype: torch.dtype) -> Tensor:
        """A buffer with undefined content that nobody uses."""
        if self._free[dtype]:
            return self._free[dtype].pop()
        self.made += 1
        self.held_bytes += self._numel * dtype.itemsize
        return self._data.buffer(self._numel, dtype, self._device)

    def give(self, buffer: Tensor) -> None:
        """The buffer may be taken again: no communication reads or writes it any more."""
        self._free[buffer.dtype].append(buffer)
