"""Arenas: contiguous storage for what lives long, made once and used again: defragmentation (M_D; ZeRO, section 6.3).

In a forward pass with recomputation the checkpoints live on while everything around them is given back, and what is
free is left in pieces between them:

      ...│ c0 │ free │ c1 │ free │ c2 │ free │ free        as they come
      ...│ c0 │ c1 │ c2 │              free                copied into slots of an arena

Parameters, gradients and optimizer states need no arena, for each of their flat buffers is made once and stays.
Addresses matter where they are memory (a GPU). On a CPU, where pages are mapped, an arena spares the system from
giving memory and taking it back at every step.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 512
"""Bytes: what CUDA's allocator aligns to, and more than the vectors of any processor need."""


class Arena:
    """Slots of `slot_bytes` each. `made` counts slots, `used` those that are taken, `blocks` the requests for memory.

    It grows where it is too small and never shrinks, so after the first step it asks for no memory again. With
    `pinned`, slots are memory of the host that a GPU copies to and from by itself; as pinning is slow, that it is done
    once matters most there.
    """

    def __init__(self, slot_bytes: int, device: torch.device, pinned: bool = False) -> None:
        self.slot_bytes = slot_bytes
        self.made = 0
        self.used = 0
        self.blocks = 0
        self._device = device
        self._pinned = pinned
        self._free: list[Tensor] = []

    def reserve(self, count: int) -> None:
        """See that so many slots are free; those that are missing are made side by side."""
        missing = count - len(self._free)
        if missing <= 0:
            return
        block = torch.empty(missing * self.slot_bytes, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
        self._free += reversed(block.view(missing, self.slot_bytes).unbind())
        self.made += missing
        self.blocks += 1

    def take(self) -> Tensor:
        """A slot with undefined content that nobody uses: (slot_bytes,) uint8."""
        self.reserve(1)
        self.used += 1
        # A version counter of its own: writing one slot must not count as changing what autograd saved of another.
        return self._free.pop().data

    def give(self, slot: Tensor) -> None:
        """The slot may be taken again."""
        self.used -= 1
        self._free.append(slot)

    @property
    def held_bytes(self) -> int:
        """Bytes of all slots."""
        return self.made * self.slot_bytes


class Arenas:
    """An arena for every size of what is kept; a smaller thing may lie in a slot of up to twice its size."""

    def __init__(self, device: torch.device, pinned: bool = False) -> None:
        self._device = device
        self._pinned = pinned
        self._arenas: list[Arena] = []

    def fitting(self, nbytes: int) -> Arena:
        """The arena whose slots hold `nbytes` with least waste; a new one if none does.

        A new one takes the place of smaller ones that nobody uses, so shapes that change from step to step leave at
        most one arena for each power of two.
        """
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        fitting = [arena for arena in self._arenas if size <= arena.slot_bytes <= 2 * size]
        if fitting:
            return min(fitting, key=lambda arena: arena.slot_bytes)
        self._arenas = [arena for arena in self._arenas if arena.used or arena.slot_bytes > size]
        self._arenas.append(Arena(size, self._device, self._pinned))
        return self._arenas[-1]

    @property
    def held_bytes(self) -> int:
        """Bytes of all slots of all arenas."""
        return sum(arena.held_bytes for arena in self._arenas)

    @property
    def blocks(self) -> int:
        """How many times they have asked for memory."""
        return sum(arena.blocks for arena in self._arenas)
