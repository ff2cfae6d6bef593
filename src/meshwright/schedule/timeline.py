"""A timeline: when each rank did what; a predicted run and a measured run are the same type.

Made by `planner.simulate` or by the engine's tracer. It knows no schedule: labels are free text. Whole and fractional
times (int, Fraction) stay exact, so that a simulated bubble equals (p-1)/(m+p-1) (GPipe, section 2.3) and not nearly
so; measured ones are floats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

Number: TypeAlias = int | float | Fraction
"""A time in seconds, or in any unit when only ratios matter."""


@dataclass(frozen=True)
class Span:
    """One rank busy with one thing from `start` to `end`."""

    rank: int
    label: str
    start: Number
    end: Number

    def __str__(self) -> str:
        return f"{self.rank} {self.start} {self.end} {self.label}"

    @classmethod
    def parse(cls, text: str) -> Span:
        """Read the text form `rank start end label`. Raises ValueError for anything else."""
        match text.split(maxsplit=3):
            case [rank, start, end, label]:
                return cls(int(rank), label, _number(start), _number(end))
            case _:
                raise ValueError(f'"{text}" is not a span; a span reads like "0 3 5 B0@0" (rank, start, end, label)')


@dataclass(frozen=True)
class Timeline:
    """Spans of any number of ranks, in any order."""

    spans: tuple[Span, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that appear, in rising order."""
        return tuple(sorted({span.rank for span in self.spans}))

    @property
    def makespan(self) -> Number:
        """Time from the first start to the last end; 0 without spans."""
        if not self.spans:
            return 0
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    def busy(self, rank: int) -> Number:
        """Time in which a rank does at least one thing: spans that overlap count once."""
        total: Number = 0
        until: Number | None = None
        for span in sorted(self._of(rank), key=lambda span: (span.start, span.end)):
            start = span.start if until is None else max(span.start, until)
            total += max(span.end - start, 0)
            until = span.end if until is None else max(span.end, until)
        return total

    @property
    def bubble(self) -> Number:
        """The idle part of all ranks' time: 1 - busy / (ranks x makespan). Exact (a Fraction) for exact times."""
        if not self.makespan:
            return 0
        busy = sum((self.busy(rank) for rank in self.ranks), start=Fraction(0))
        whole = len(self.ranks) * self.makespan
        if isinstance(busy, Fraction) and isinstance(whole, int | Fraction):
            return 1 - busy / whole
        return 1 - float(busy) / float(whole)

    def to_chrome_trace(self) -> str:
        """JSON for chrome://tracing or Perfetto: a row per rank; times are seconds, counted from the first start."""
        begin = min((span.start for span in self.spans), default=0)
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
            for rank in self.ranks
        ]
        events = [
            {
                "ph": "X",
                "name": span.label,
                "pid": 0,
                "tid": span.rank,
                "ts": float(span.start - begin) * 1e6,
                "dur": float(span.end - span.start) * 1e6,
            }
            for span in self.spans
        ]
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": [*names, *events]})

    def __str__(self) -> str:
        return "\n".join(map(str, self.spans))

    @classmethod
    def parse(cls, text: str) -> Timeline:
        """Read the text form: one span a line. Raises ValueError naming the line that does not read."""
        return cls(tuple(Span.parse(line) for line in text.splitlines() if line.strip()))

    def _of(self, rank: int) -> Iterable[Span]:
        return (span for span in self.spans if span.rank == rank)


def _number(text: str) -> Number:
    """Read an int, a fraction like 1/3, or a float."""
    if re.fullmatch(r"-?[0-9]+", text):
        return int(text)
    return Fraction(text) if "/" in text else float(text)
