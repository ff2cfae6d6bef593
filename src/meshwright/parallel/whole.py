"""Where the whole values of a unit live, and how they come together from the shards.

    PrivateWhole    memory of this rank; under stage 3 given back to the system between release and gather
    SharedWhole     one memory for all data ranks of a host: each writes its own part there, once, and a gather only
                    waits until all have written theirs

With shared memory the whole parameters of a unit exist once per host instead of once per rank, under stages 1, 2 and
3 alike, and stage 3 has nothing to give back.
"""

from __future__ import annotations

from typing import Protocol, final

import torch
from torch import Tensor

from meshwright.comm.group import Done, Group, Handle


class Whole(Protocol):
    """The whole values of one unit. `values` is what parameters are views of, and autograd saves."""

    values: Tensor
    writable: Tensor
    """The same memory with a version counter of its own: gathering must not count as changing what backward has
    saved."""

    @property
    def held_bytes(self) -> int:
        """Bytes that this rank answers for now."""

    def changed(self) -> None:
        """This rank has changed its own part: what the others see must be gathered anew."""

    def start_gather(self, own: Tensor) -> Handle:
        """Begin to make the whole from every rank's `own` part."""

    def release(self) -> None:
        """The values are not needed until the next gather."""


@final
class PrivateWhole:
    """Memory of this rank alone, `numel` zeros; `releases` says whether it is given back in between."""

    def __init__(self, data: Group, numel: int, dtype: torch.dtype, device: torch.device, releases: bool) -> None:
        self._data = data
        self._releases = releases
        self.values = torch.zeros(numel, dtype=dtype, device=device)
        self.writable = self.values.data
        self._bytes = self.values.untyped_storage().nbytes()

    @property
    def held_bytes(self) -> int:
        """See `Whole`."""
        return self.values.untyped_storage().nbytes()

    def changed(self) -> None:
        """See `Whole`; every gather here is a new one anyway."""

    def start_gather(self, own: Tensor) -> Handle:
        """See `Whole`."""
        if self._releases:
            self.values.untyped_storage().resize_(self._bytes)
        return self._data.start_all_gather(own, self.writable, label="parameters")

    def release(self) -> None:
        """See `Whole`."""
        if self._releases:
            self.values.untyped_storage().resize_(0)


@final
class SharedWhole:
    """One memory for the data ranks of a host, of which this rank writes its own part only.

    It may write while no other rank reads: between the reduction that ends a step's backward passes on all ranks (the
    norm) and the gather that follows.
    """

    def __init__(self, data: Group, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._data = data
        self._current = False
        self.values = data.whole(numel, dtype, device)
        self.writable = self.values.data

    @property
    def held_bytes(self) -> int:
        """See `Whole`: the own part of what exists once."""
        return self.values.untyped_storage().nbytes() // self._data.size

    def changed(self) -> None:
        """See `Whole`."""
        self._current = False

    def start_gather(self, own: Tensor) -> Handle:
        """See `Whole`: a meeting of the ranks if anything has changed since the last one, else nothing."""
        if self._current:
            return Done()
        self._current = True
        return self._data.start_all_gather(own, self.writable, label="parameters")

    def release(self) -> None:
        """See `Whole`; others may be reading."""
