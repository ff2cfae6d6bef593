"""Messages between the ranks of a pipeline on one host, through rings in the memory of the sender.

A ring holds what one rank sends to one other in one channel. The sender copies a message into memory of its own, notes
in the ring where, and is done: it does not wait for the receiver while the ring has room.

      │ sent │ taken │ notes: DEPTH × 64 bytes │     sent is written by the sender, taken by the receiver

Memory for messages is taken from the arena when it is first needed and used again, the latest first, as soon as the
receiver has taken the message out: while the receiver keeps up, the same few pages stay in the cache.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from meshwright.comm.channel import Channel
from meshwright.comm.group import Done, Handle, MismatchError
from meshwright.comm.ledger import Entry, Ledger
from meshwright.comm.shared.arena import ALIGNMENT
from meshwright.comm.shared.copy import copy
from meshwright.comm.shared.futex import WORD
from meshwright.comm.shared.host import Host
from meshwright.comm.shared.progress import Gate, Lane, Peer, Progress, Steps
from meshwright.comm.shared.signature import code, dtype_of, elements

DEPTH = 64
"""Messages that may be on their way from one rank to another."""

_NOTE = struct.Struct("<QQB")
_NOTES = 2 * ALIGNMENT
RING = _NOTES + DEPTH * ALIGNMENT
"""Bytes of a ring."""


@dataclass(frozen=True)
class _Memory:
    offset: int
    nbytes: int


class Outgoing:
    """The sender's end of the ring at `offset`."""

    def __init__(self, host: Host, offset: int, receiver: int, lane: Lane) -> None:
        self.lane = lane
        self._host = host
        self._offset = offset
        self._taken = Peer(receiver, (offset + ALIGNMENT) // WORD)
        self._sent = self._collected = 0
        self._under_way: deque[_Memory] = deque()
        self._free: list[_Memory] = []

    def has_room(self) -> bool:
        """Whether a message can be put in now."""
        return self._room().is_open()

    def steps(self, tensor: Tensor) -> Steps:
        """Put a message in once there is room."""
        yield self._room()
        self.put(tensor)

    def put(self, tensor: Tensor) -> None:
        """Put a message in; there must be room."""
        self._collect()
        segment, numel = self._host.segment, tensor.numel()
        memory = self._memory(numel * tensor.element_size())
        copy(tensor, segment.tensor(memory.offset, numel, tensor.dtype))
        note = self._offset + _NOTES + self._sent % DEPTH * ALIGNMENT
        _NOTE.pack_into(segment.bytes, note, memory.offset, numel, code(tensor.dtype))
        self._under_way.append(memory)
        self._sent += 1
        segment.words.publish(self._offset // WORD, self._sent)

    def _room(self) -> Gate:
        return Gate(self._host.segment.words, (self._taken,), self._sent - DEPTH + 1)

    def _collect(self) -> None:
        """Take back the memory of messages that have been taken out."""
        while self._under_way and not self._host.segment.words.behind(self._taken.word, self._collected + 1):
            self._free.append(self._under_way.popleft())
            self._collected += 1

    def _memory(self, nbytes: int) -> _Memory:
        while self._free:
            memory = self._free.pop()
            if memory.nbytes >= nbytes:
                return memory
            self._host.arena.give(memory.offset)  # a larger message has come, and more like it will follow
        return _Memory(self._host.arena.take(nbytes), nbytes)


class Incoming:
    """The receiver's end of the ring at `offset`."""

    def __init__(self, host: Host, offset: int, sender: int, lane: Lane) -> None:
        self.lane = lane
        self._host = host
        self._offset = offset
        self._sent = Peer(sender, offset // WORD)
        self._taken = 0

    def steps(self, tensor: Tensor, label: str) -> Steps:
        """Take the next message out into `tensor`."""
        segment = self._host.segment
        yield Gate(segment.words, (self._sent,), self._taken + 1)
        note = self._offset + _NOTES + self._taken % DEPTH * ALIGNMENT
        offset, numel, dtype = _NOTE.unpack_from(segment.bytes, note)
        fits = numel == tensor.numel() and dtype_of(dtype) is tensor.dtype
        if fits:
            copy(segment.tensor(offset, numel, tensor.dtype), tensor)
        self._taken += 1
        segment.words.publish((self._offset + ALIGNMENT) // WORD, self._taken)
        if not fits:
            sent = f"rank {self._sent.rank} sent {elements(numel, dtype_of(dtype))}"
            received = f"rank {self._host.rank} receives {elements(tensor.numel(), tensor.dtype)}"
            raise MismatchError(f"message {self._taken - 1} of {label}: {sent}, but {received}")


class SharedChannel(Channel):
    """A channel whose messages go through shared memory; every rank of the pipeline makes it at the same time."""

    def __init__(
        self, label: str, ranks: tuple[int, ...], index: int, ledger: Ledger, host: Host, progress: Progress
    ) -> None:
        super().__init__(label, ranks, index, ledger)
        rings = host.arena.take(len(ranks) * RING)
        for peer in range(len(ranks)):
            host.segment.bytes[rings + peer * RING :][:_NOTES] = bytes(_NOTES)
        starts = host.exchange(f"channel-{label}", ranks, rings)
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: dict[int, Incoming] = {}
        for peer, rank in enumerate(ranks):
            if peer != index:
                to, back = (Lane(progress, ledger, self._where(way, peer)) for way in ("to", "from"))
                self._outgoing[peer] = Outgoing(host, rings + peer * RING, rank, to)
                self._incoming[peer] = Incoming(host, starts[peer] + index * RING, rank, back)

    def _send(self, flat: Tensor, peer: int, entry: Entry) -> Handle:
        ring = self._outgoing[peer]
        if ring.lane.head is None and ring.has_room():
            ring.put(flat)
            return Done()
        return ring.lane.start(ring.steps(flat), entry)

    def _receive(self, flat: Tensor, peer: int, entry: Entry) -> Handle:
        ring = self._incoming[peer]
        return ring.lane.start(ring.steps(flat, self.label), entry)
