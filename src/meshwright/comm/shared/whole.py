"""Memory that is one for all members of a group: who hands it out, and when it is free again.

Member 0 takes it from its arena. It stays taken until every member has let go of it, which each says by a byte of its
own in front of the memory; member 0 looks at these whenever it makes another.

      │ member 0 gone │ member 1 gone │ ... to a full line │ the memory ........ │
"""

from __future__ import annotations

import weakref

from meshwright.comm.shared.arena import ALIGNMENT, Arena
from meshwright.comm.shared.segment import Segment


class WholeMemory:
    """The common memory of a group of `size` members, of which this is `index`."""

    def __init__(self, segment: Segment, arena: Arena, index: int, size: int) -> None:
        self._segment = segment
        self._arena = arena
        self._index = index
        self._size = size
        self._front = -(-size // ALIGNMENT) * ALIGNMENT
        self._made: list[int] = []

    def make(self, nbytes: int) -> int:
        """On member 0: the offset of new memory, which every member must then `use`."""
        self._collect()
        start = self._arena.take(self._front + nbytes)
        self._segment.bytes[start : start + self._size] = bytes(self._size)
        self._made.append(start)
        return start + self._front

    def use(self, offset: int, nbytes: int) -> memoryview:
        """The memory at `offset`; this member lets go of it when nothing made from it is left."""
        memory = self._segment.part(offset, nbytes)
        flag = offset - self._front + self._index
        weakref.finalize(memory, self._segment.bytes.__setitem__, flag, 1).atexit = False
        return memory

    def _collect(self) -> None:
        for start in tuple(self._made):
            if all(self._segment.bytes[start : start + self._size]):
                self._made.remove(start)
                self._arena.give(start)
