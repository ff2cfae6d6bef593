"""Records what a rank really did, as the same `Timeline` that the simulator predicts.

On a GPU the times are those of CUDA events on the current stream, read once at the end, so that tracing does not make
the host wait; on the CPU they are the clock's.
"""

from __future__ import annotations

import time
from itertools import pairwise

import torch

from meshwright.schedule.timeline import Span, Timeline


class Tracer:
    """Times of one rank's actions. One that is not `enabled` records nothing and costs nothing."""

    def __init__(self, rank: int, device: torch.device, enabled: bool = True) -> None:
        self.rank = rank
        self.enabled = enabled
        self._cuda = device.type == "cuda"
        self._labels: list[str] = []
        self._times: list[float | torch.cuda.Event] = []

    def begin(self, label: str) -> None:
        """The action `label` begins, and the one before it has ended."""
        if self.enabled:
            self._labels.append(label)
            self._times.append(self._now())

    def end(self) -> None:
        """The last action has ended."""
        if self.enabled:
            self._times.append(self._now())

    def timeline(self) -> Timeline:
        """The spans recorded so far, in seconds since the first."""
        if not self._labels:
            return Timeline(())
        if self._cuda:
            torch.cuda.synchronize()
        seconds = [self._since_first(moment) for moment in self._times]
        return Timeline(
            tuple(
                Span(self.rank, label, start, end)
                for label, (start, end) in zip(self._labels, pairwise(seconds), strict=True)
            )
        )

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _since_first(self, moment: float | torch.cuda.Event) -> float:
        first = self._times[0]
        if isinstance(moment, float):
            assert isinstance(first, float)
            return moment - first
        assert not isinstance(first, float)
        return float(first.elapsed_time(moment)) / 1000
