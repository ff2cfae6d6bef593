"""Where the members of a group post what they start, and count how far they are.

There is one block per member, in its arena:

      │ posted │ clock │ headers: WINDOW × 128 bytes │ data: WINDOW × SMALL bytes │

      posted   how many operations this member has started
      clock    how many ticks it has made: every operation is the same number of ticks on all members, so the same
               clock means the same place in the same operation
      header   of operation k, at k mod WINDOW: its signature, and where in the segment its tensors are
      data     of operation k: all that this member gives to it, if that is small

Each block is written by its member only. Operation k may be posted when all members have finished k - WINDOW.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm.group import MismatchError
from meshwright.comm.shared import signature
from meshwright.comm.shared.arena import ALIGNMENT
from meshwright.comm.shared.futex import WORD
from meshwright.comm.shared.host import Host
from meshwright.comm.shared.progress import Gate, Peer

WINDOW = 16
"""Operations that may be under way before the first of them must have ended on all members."""

SMALL = 16 * 1024
"""Bytes up to which a tensor travels beside its signature."""

_HEADER = 128
_PLACES = struct.Struct("<qqq")
_NOWHERE = -1
_HEADERS = 2 * ALIGNMENT
_DATA = _HEADERS + WINDOW * _HEADER
BLOCK = _DATA + WINDOW * SMALL
"""Bytes of a member's block."""

assert signature.SIZE + _PLACES.size <= _HEADER


@dataclass(frozen=True)
class Places:
    """Offsets in the segment of one member's source and target, if they are there, and of its staging area."""

    source: int | None
    target: int | None
    staging: int | None


class Board:
    """The blocks of a group's members, whose offsets are `blocks`; this process is member `index`."""

    def __init__(self, host: Host, ranks: tuple[int, ...], index: int, blocks: tuple[int, ...]) -> None:
        self.host = host
        self.ranks = ranks
        self.index = index
        self.clock = 0
        self._blocks = blocks
        self._bytes = host.segment.bytes
        others = [member for member in range(len(ranks)) if member != index]
        self._posts = tuple(Peer(ranks[member], blocks[member] // WORD) for member in others)
        self._clocks = tuple(Peer(ranks[member], (blocks[member] + ALIGNMENT) // WORD) for member in others)

    @classmethod
    def make(cls, host: Host, name: str, ranks: tuple[int, ...]) -> Board:
        """A board for `ranks`, all of whom call this with the same `name`, which no other board of them has."""
        block = host.arena.take(BLOCK)
        host.segment.bytes[block : block + _HEADERS] = bytes(_HEADERS)
        return cls(host, ranks, ranks.index(host.rank), host.exchange(name, ranks, block))

    # --- what this member writes ---------------------------------------------------------------------------------

    def post(self, number: int, packed: bytes, places: Places) -> None:
        """Tell the others that operation `number` has begun here; its small data must have been written."""
        offsets = (places.source, places.target, places.staging)
        start = self._header(self.index, number)
        stop = start + signature.SIZE
        self._bytes[start:stop] = packed
        _PLACES.pack_into(self._bytes, stop, *(_NOWHERE if offset is None else offset for offset in offsets))
        self.host.segment.words.publish(self._blocks[self.index] // WORD, number + 1)

    def tick(self) -> None:
        """Tell the others that this member is one step further."""
        self.clock += 1
        self.host.segment.words.publish((self._blocks[self.index] + ALIGNMENT) // WORD, self.clock)

    # --- what the others write -----------------------------------------------------------------------------------

    def posted(self, number: int) -> Gate:
        """Open when all have posted operation `number`."""
        return Gate(self.host.segment.words, self._posts, number + 1)

    def reached(self, clock: int) -> Gate:
        """Open when all have made `clock` ticks."""
        return Gate(self.host.segment.words, self._clocks, clock)

    def check(self, number: int, packed: bytes, group: str) -> None:
        """Raise MismatchError, on all members alike, unless all have posted the same signature."""
        starts = [self._header(member, number) for member in range(len(self.ranks))]
        posted = [bytes(self._bytes[start : start + signature.SIZE]) for start in starts]
        if any(each != packed for each in posted):
            raise MismatchError(f"{group}: {signature.difference(number, self.ranks, posted)}")

    def places(self, number: int) -> tuple[Places, ...]:
        """Where every member has its tensors."""
        starts = (self._header(member, number) + signature.SIZE for member in range(len(self.ranks)))
        return tuple(
            Places(*(None if offset == _NOWHERE else offset for offset in _PLACES.unpack_from(self._bytes, start)))
            for start in starts
        )

    def small(self, member: int, number: int, numel: int, dtype: torch.dtype) -> Tensor:
        """The small data of `member` for operation `number`."""
        offset = self._blocks[member] + _DATA + number % WINDOW * SMALL
        return self.host.segment.tensor(offset, numel, dtype)

    def _header(self, member: int, number: int) -> int:
        return self._blocks[member] + _HEADERS + number % WINDOW * _HEADER
