"""Which bytes of a rank's part of the segment are taken: a list of holes, first fit from below.

Only the rank itself takes and gives back, so this is ordinary memory of one process. Pages once written stay with the
process, and the lowest hole is taken first, so what was given back is used again before anything new is touched.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 64
"""Bytes: a cache line, so that two ranks never write to the same one."""


@dataclass
class _Hole:
    start: int
    stop: int


class Arena:
    """The offsets [start, stop), both multiples of `ALIGNMENT`."""

    def __init__(self, start: int, stop: int) -> None:
        assert start % ALIGNMENT == stop % ALIGNMENT == 0, (start, stop)
        self._holes = [_Hole(start, stop)]
        self._taken: dict[int, int] = {}
        self._returned: list[int] = []

    def take(self, nbytes: int) -> int:
        """The offset of `nbytes` bytes that are now the caller's; their content is undefined."""
        while self._returned:
            self._close(self._returned.pop())
        nbytes = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        for place, hole in enumerate(self._holes):
            if hole.stop - hole.start >= nbytes:
                offset = hole.start
                hole.start += nbytes
                if hole.start == hole.stop:
                    del self._holes[place]
                self._taken[offset] = nbytes
                return offset
        largest = max((hole.stop - hole.start for hole in self._holes), default=0)
        raise MemoryError(f"{nbytes} bytes of shared memory do not fit; the largest hole has {largest}")

    def give(self, offset: int) -> None:
        """Give back what `take` returned.

        It is marked here and closed by the next `take`: the garbage collector may call this in the middle of one.
        """
        self._returned.append(offset)

    @property
    def taken(self) -> int:
        """Bytes that are taken now."""
        return sum(self._taken.values()) - sum(self._taken[offset] for offset in self._returned)

    def _close(self, offset: int) -> None:
        start, stop = offset, offset + self._taken.pop(offset)
        place = next((i for i, hole in enumerate(self._holes) if hole.start >= stop), len(self._holes))
        if place < len(self._holes) and self._holes[place].start == stop:
            stop = self._holes.pop(place).stop
        if place > 0 and self._holes[place - 1].stop == start:
            self._holes[place - 1].stop = stop
        else:
            self._holes.insert(place, _Hole(start, stop))
