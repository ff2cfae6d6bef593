"""The reductions of units' gradients that are under way: a bounded number, so that their buffers are too.

Constant-size buffers (C_B of ZeRO-R; Rajbhandari et al., 2020, section 6.2). In which order units come is the caller's
business; all ranks must bring the same.
"""

from __future__ import annotations

from collections import deque

from meshwright.parallel.unit import Unit

UNDER_WAY = 2
"""Reductions at a time, besides the one that is being started."""


class Reductions:
    """Those of one rank, the oldest first."""

    def __init__(self) -> None:
        self._units: deque[Unit] = deque()

    def start(self, unit: Unit) -> None:
        """Begin to reduce the gradient of `unit`, waiting for the oldest reduction if too many are under way."""
        unit.gradient.start_reduce()
        self._units.append(unit)
        if len(self._units) > UNDER_WAY:
            self._units.popleft().finish_reduce()

    def finish(self) -> None:
        """Wait for all of them."""
        while self._units:
            self._units.popleft().finish_reduce()

    def forget(self) -> None:
        """Wait for none: an error has ended what they belong to."""
        self._units.clear()
