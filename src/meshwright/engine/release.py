"""Gives back to the system what building a model and its first steps needed, and nothing holds any more.

A C library keeps freed memory for later. What stays of the first steps, the optimizer's states among it, lies between
what they needed for a while, and later steps fill those gaps badly: on a CPU a rank's peak was up to 14 % above what
was alive in it. Given back once, pages come again only where they are needed. On a GPU torch's allocator has the memory
to itself, and keeps it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

FIRST = 2
"""Steps: the first makes the states, in the second everything has its place. After every step it would cost 7 %."""


class FirstSteps:
    """Counts the steps of one engine."""

    def __init__(self, device: torch.device) -> None:
        self._left = FIRST if device.type == "cpu" else 0

    def ended(self) -> None:
        """A step has ended: let the system have every whole page that is free, if it was one of the first."""
        if self._left:
            self._left -= 1
            trim = _malloc_trim()
            if trim is not None:
                trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """What glibc offers for it; other C libraries do not."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
