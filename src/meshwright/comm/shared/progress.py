"""Communications under way on one rank, and waiting for peers.

Glossary
    gate       a set of peers' counters and the value that all of them must reach
    steps      what a rank does for one communication: a generator that yields a gate wherever it depends on peers
    operation  steps under way: the handle that the caller waits on
    lane       the operations of one group or channel in the order they were started; only the first moves

A rank that waits for one operation moves everything else it has started as far as it goes, so two ranks may wait for
operations of several groups in different orders: each does meanwhile what the other needs. Nothing happens between
calls, because there is no thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import NoReturn, final

from meshwright.comm.group import CommunicationError
from meshwright.comm.ledger import Entry, Ledger
from meshwright.comm.shared.futex import Words
from meshwright.comm.shared.host import Host
from meshwright.comm.shared.process import Life

_LOOK = 0.2
"""Seconds between two looks at whether those we wait for still live."""

_NAP = 0.001
"""Seconds of the first sleep while something else is under way that a peer could unlock; then twice as long each."""


@dataclass(frozen=True)
class Peer:
    """A rank that is waited for, and the word that it counts in."""

    rank: int
    word: int


class Gate:
    """Open once each of `peers` has counted up to `value`."""

    __slots__ = ("_arrived", "_words", "peers", "value")

    def __init__(self, words: Words, peers: tuple[Peer, ...], value: int) -> None:
        self._words = words
        self.peers = peers
        self.value = value
        self._arrived = 0  # so many of the first have

    def is_open(self) -> bool:
        """Whether nobody is missing."""
        while self._arrived < len(self.peers):
            if self._words.behind(self.peers[self._arrived].word, self.value):
                return False
            self._arrived += 1
        return True

    def absent(self) -> tuple[Peer, ...]:
        """Who is missing."""
        return tuple(peer for peer in self.peers if self._words.behind(peer.word, self.value))


Steps = Generator[Gate, None, None]


@final
class Operation:
    """A communication that was started; a `Handle`."""

    def __init__(self, lane: Lane, steps: Steps, entry: Entry) -> None:
        self.entry = entry
        self.done = False
        self.gate: Gate | None = None
        self._lane = lane
        self._steps = steps
        self._error: Exception | None = None

    def wait(self) -> None:
        """Return when the result is there; a second call returns at once. Raises what went wrong in this operation."""
        begun = time.perf_counter()
        waits = not self.done
        try:
            self.complete()
        finally:
            if waits:
                self._lane.ledger.waited(self.entry, time.perf_counter() - begun)

    def complete(self) -> None:
        """`wait` without the ledger, for what the caller did not ask for."""
        if not self.done:
            self._lane.progress.finish(self, self._lane)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def advance(self) -> bool:
        """Go on to the next gate that is closed; whether any step was taken."""
        moved = False
        while self.gate is None or self.gate.is_open():
            moved = True
            try:
                self.gate = next(self._steps)
            except StopIteration:
                self.done = True
                break
            except Exception as error:  # it is this operation's, whoever moves it
                self.done, self._error = True, error
                break
        return moved

    def __str__(self) -> str:
        return f"{self._lane.where}: {self.entry.kind} of {self.entry.label}"


class Lane:
    """Operations that happen one after the other. `where` names rank and peers in errors."""

    def __init__(self, progress: Progress, ledger: Ledger, where: str) -> None:
        self.progress = progress
        self.ledger = ledger
        self.where = where
        self._operations: deque[Operation] = deque()

    @property
    def head(self) -> Operation | None:
        """The operation that moves."""
        return self._operations[0] if self._operations else None

    def start(self, steps: Steps, entry: Entry) -> Operation:
        """Put an operation at the end."""
        operation = Operation(self, steps, entry)
        self._operations.append(operation)
        self.progress.lanes[self] = None
        return operation

    def advance(self) -> bool:
        """Take every step that depends on nobody who is missing; whether there was any."""
        moved = False
        while self._operations:
            moved |= self._operations[0].advance()
            if not self._operations[0].done:
                return moved
            self._operations.popleft()
        del self.progress.lanes[self]
        return moved


class Progress:
    """Everything that one rank has under way on one host."""

    def __init__(self, host: Host) -> None:
        self.lanes: dict[Lane, None] = {}
        self._host = host
        self._spin = _Spin(host.spin)

    def finish(self, operation: Operation, lane: Lane) -> None:
        """Return when `operation` is done, and with it all that stand before it in its `lane`.

        Raises CommunicationError if a peer on which the lane depends has ended, or does nothing for it in time.
        """
        patience = _Patience(self._host, self._spin)
        lane.advance()
        while not operation.done:
            head = lane.head
            assert head is not None and head.gate is not None
            if not (patience.spin(head.gate) or self._help(lane)):
                patience.sleep(head, head.gate, alone=len(self.lanes) == 1)
            if lane.advance():
                patience.renew()
        patience.close()

    def _help(self, lane: Lane) -> bool:
        """Move what stands in other lanes; whether anything moved."""
        return any(other.advance() for other in tuple(self.lanes) if other is not lane)


class _Spin:
    """Looking at a gate for some microseconds before going to sleep: worth it only while peers have a core to come on.

    Where other programs take the cores, a rank that spins keeps its peer from arriving. So after two waits in which
    looking was in vain, only every sixteenth tries it again.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._misses = 0

    def until_open(self, gate: Gate) -> bool:
        """Whether the gate is open, or opened while we looked."""
        if gate.is_open():
            return True
        if self._seconds == 0:
            return False
        opened = False
        if self._misses < 2 or self._misses % 16 == 0:
            end = time.perf_counter() + self._seconds
            while not opened and time.perf_counter() < end:
                opened = gate.is_open()
        self._misses = 0 if opened else self._misses + 1
        return opened


class _Patience:
    """One rank waiting: how it spins and sleeps, when it looks at its peers, and when it gives up."""

    def __init__(self, host: Host, spin: _Spin) -> None:
        self._host = host
        self._spin = spin
        self._begun = self._moved = self._looked = time.monotonic()
        self._spun = False
        self._nap = _NAP
        self._noticed = False

    def renew(self) -> None:
        """Something has moved: the time-out begins anew."""
        self._moved = time.monotonic()
        self._spun = False

    def spin(self, gate: Gate) -> bool:
        """Look at the gate, for some time if it is the first time; whether it has opened."""
        if self._spun:
            return gate.is_open()
        self._spun = True
        return self._spin.until_open(gate)

    def sleep(self, operation: Operation, gate: Gate, alone: bool) -> None:
        """Sleep until someone who is missing at the gate may have come; at times, see what has become of them.

        `alone` says that nothing else is under way, so that only this gate can be what peers wait for.
        """
        words = self._host.segment.words
        for peer in gate.absent()[:1]:
            seen = words.load(peer.word)
            if words.behind(peer.word, gate.value):
                words.sleep(peer.word, seen, min(self._host.timeout, _LOOK if alone else self._nap))
        self._nap = min(2 * self._nap, _LOOK)
        now = time.monotonic()
        if now - self._looked >= min(_LOOK, self._host.timeout):
            self._looked = now
            self._look(operation, gate, now)

    def close(self) -> None:
        """The wait is over."""
        if self._noticed:
            self._host.notice("")

    def _look(self, operation: Operation, gate: Gate, now: float) -> None:
        lives = {peer: self._host.processes[peer.rank].life() for peer in gate.absent()}
        # Only now: who has ended may have arrived before, between the two looks.
        absent = tuple(peer for peer in gate.absent() if peer in lives)
        if not absent:
            return
        gone = tuple(peer.rank for peer in absent if lives[peer] is Life.GONE)
        if gone:
            self._give_up(operation, now, f"{_named(gone)} ended without having arrived")
        if now - self._moved >= self._host.timeout:
            self._give_up(operation, now, "; ".join(self._reason(peer, lives[peer]) for peer in absent))
        self._host.notice(f"waits for {_named(tuple(peer.rank for peer in absent))}: {operation}")
        self._noticed = True

    def _give_up(self, operation: Operation, now: float, reason: str) -> NoReturn:
        self._host.notice(f"has given up: {operation}")
        raise CommunicationError(f"{operation} failed after waiting {now - self._begun:.1f} s: {reason}")

    def _reason(self, peer: Peer, life: Life) -> str:
        if life is Life.STOPPED:
            return f"rank {peer.rank} has not arrived: its process {self._host.processes[peer.rank].number} is stopped"
        notice = self._host.read_notice(peer.rank) or "is running and waits for nobody"
        return f"rank {peer.rank} has not arrived: it {notice}"


def _named(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
