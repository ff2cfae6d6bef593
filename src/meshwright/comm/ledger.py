"""The ledger of one rank: every collective and message, counted by kind, axis and label.

What a plan predicts about traffic is held against these counts, so they follow one rule, the one of the papers: a
group of n ranks sends, per rank, 2 (n-1)/n of the payload for an all-reduce, (n-1)/n of the whole tensor for a
reduce-scatter, an all-gather or an all-to-all, and the payload itself for a message (ZeRO, section 7; Patarasuk and
Yuan, 2009).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What was communicated."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    BARRIER = "barrier"
    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True, order=True)
class Entry:
    """The heading under which a call is counted; `label` says what it was for ("gradients", "activations", ...)."""

    kind: Kind
    axis: str
    label: str


@dataclass(frozen=True)
class Tally:
    """What stands under one heading: calls, bytes of payload, bytes this rank sent, seconds it waited."""

    calls: int = 0
    payload: int = 0
    sent: int = 0
    seconds: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.calls + other.calls, self.payload + other.payload, self.sent + other.sent, self.seconds + other.seconds
        )

    def __sub__(self, other: Tally) -> Tally:
        return Tally(
            self.calls - other.calls, self.payload - other.payload, self.sent - other.sent, self.seconds - other.seconds
        )


def sent_bytes(kind: Kind, payload: int, ranks: int) -> int:
    """Bytes one of `ranks` ranks sends for a collective over `payload` bytes (the whole tensor, not the shard)."""
    match kind:
        case Kind.ALL_REDUCE:
            return 2 * payload * (ranks - 1) // ranks
        case Kind.REDUCE_SCATTER | Kind.ALL_GATHER | Kind.ALL_TO_ALL | Kind.BROADCAST:
            return payload * (ranks - 1) // ranks
        case Kind.SEND:
            return payload
        case Kind.BARRIER | Kind.RECEIVE:
            return 0


class Ledger:
    """Counts the calls of one rank; the groups and channels of a process share one."""

    def __init__(self) -> None:
        self._tallies: dict[Entry, Tally] = {}

    def count(self, entry: Entry, payload: int, ranks: int) -> None:
        """Add one call over `payload` bytes in a group of `ranks`."""
        self._add(entry, Tally(1, payload, sent_bytes(entry.kind, payload, ranks)))

    def waited(self, entry: Entry, seconds: float) -> None:
        """Add the time this rank stood still for a call already counted."""
        self._add(entry, Tally(seconds=seconds))

    def _add(self, entry: Entry, tally: Tally) -> None:
        self._tallies[entry] = self._tallies.get(entry, Tally()) + tally

    def total(self, kind: Kind | None = None, axis: str | None = None, label: str | None = None) -> Tally:
        """The sum over every heading that matches what is given."""
        chosen = (
            tally
            for entry, tally in self._tallies.items()
            if kind in (None, entry.kind) and axis in (None, entry.axis) and label in (None, entry.label)
        )
        return sum(chosen, Tally())

    def __iter__(self) -> Iterator[tuple[Entry, Tally]]:
        return iter(sorted(self._tallies.items()))

    def clear(self) -> None:
        """Start counting anew."""
        self._tallies.clear()
