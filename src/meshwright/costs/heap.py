"""A contiguous address space in which blocks are placed: what fragmentation is, and what it costs.

A GPU has no pages to hide it: a block needs neighbouring addresses, and free memory that lies in pieces between blocks
that stay is of no use to a larger one (ZeRO, section 3.2). This is a model with the two textbook policies, exact for
a given sequence of requests; an allocator that keeps sizes apart, as torch's for CUDA does, wastes elsewhere.

      0        alive       free     alive   free     top ..... size
      ├──────────────────┼────────┼───────┼────────┼──────────────┤
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

ALIGNMENT = 512
"""Bytes: every block begins at a multiple of it, as in CUDA."""


class Fit(Enum):
    """Which hole a block is put in: the lowest that is large enough, or the smallest."""

    FIRST = "first"
    BEST = "best"


@dataclass(frozen=True, order=True)
class Hole:
    """Free addresses [start, stop)."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.stop - self.start


class Heap:
    """Blocks by their address. `alive`: bytes of all; `top`: one past the highest; `needed`: the highest `top` so far.

    It is as large as it has to be: a block that fits in no hole is put at the top.
    """

    def __init__(self, fit: Fit) -> None:
        self.alive = 0
        self.top = 0
        self.needed = 0
        self._fit = fit
        self._sizes: dict[int, int] = {}
        self._holes: list[Hole] = []  # by address, never two that touch, none that ends at the top

    def take(self, nbytes: int) -> int:
        """Place a block of at least `nbytes`; returns its address."""
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        hole = self._choose(size)
        address = self.top if hole is None else hole.start
        if hole is None:
            self.top += size
        else:
            self._holes.remove(hole)
            if hole.nbytes > size:
                insort(self._holes, Hole(address + size, hole.stop))
        self._sizes[address] = size
        self.alive += size
        self.needed = max(self.needed, self.top)
        return address

    def give(self, address: int) -> None:
        """Free the block at `address`, and join it with the holes beside it. Raises KeyError if there is none."""
        size = self._sizes.pop(address)
        self.alive -= size
        start, stop = address, address + size
        after = bisect_left(self._holes, Hole(start, stop))
        if after < len(self._holes) and self._holes[after].start == stop:
            stop = self._holes.pop(after).stop
        if after and self._holes[after - 1].stop == start:
            start = self._holes.pop(after - 1).start
        if stop == self.top:
            self.top = start
        else:
            insort(self._holes, Hole(start, stop))

    def holes(self, size: int) -> Iterator[Hole]:
        """What is free in a memory of `size` bytes, the rest above the top included."""
        yield from self._holes
        if size > self.top:
            yield Hole(self.top, size)

    def fragmentation(self, size: int) -> float:
        """1 - largest hole / everything free, in a memory of `size` bytes; 0 where nothing is free."""
        holes = [hole.nbytes for hole in self.holes(size)]
        return 1 - max(holes) / sum(holes) if holes else 0.0

    def _choose(self, size: int) -> Hole | None:
        fitting = (hole for hole in self._holes if hole.nbytes >= size)
        match self._fit:
            case Fit.FIRST:
                return next(fitting, None)
            case Fit.BEST:
                return min(fitting, key=lambda hole: hole.nbytes, default=None)
            case _:
                assert_never(self._fit)
