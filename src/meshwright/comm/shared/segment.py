"""The memory that the ranks of a host share: one file without a name, mapped by each of them.

The file is Linux's memfd. It has no name in any file system; another process of the same user opens it through
`/proc/<pid>/fd/<fd>`, and the kernel frees it when the last process that maps it is gone, however that ended. It is as
large as everything that could ever be placed in it, because only pages that were written take memory: so nothing grows,
nothing moves, and an offset means the same thing in every process.
"""

from __future__ import annotations

import mmap
import os
from typing import Self

import torch
from torch import Tensor

from meshwright.comm.shared.futex import Words


class Segment:
    """A mapping of `size` bytes that other processes may map too. Everything in it is named by its offset in bytes."""

    def __init__(self, file: int, size: int) -> None:
        """Maps `file`, a descriptor. Raises OSError if the system refuses."""
        self.size = size
        self._mapping = mmap.mmap(file, size)
        self._address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
        self.bytes = memoryview(self._mapping)
        self.words = Words(self._mapping, self._address)

    @classmethod
    def create(cls, size: int) -> tuple[Self, int]:
        """A new segment of zeros, and the descriptor by which others can open it as long as it is not closed."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        file = os.memfd_create("meshwright")
        try:
            os.ftruncate(file, size)
            return cls(file, size), file
        except BaseException:
            os.close(file)
            raise

    @classmethod
    def open(cls, process: int, file: int, size: int) -> Self:
        """The segment that `process` has open as `file`."""
        ours = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(ours).st_size != size:
                raise OSError(f"/proc/{process}/fd/{file} is another file")
            return cls(ours, size)
        finally:
            os.close(ours)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """The `numel` elements at `offset`, with a storage of just these."""
        return torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=offset)

    def part(self, offset: int, nbytes: int) -> memoryview:
        """The bytes at `offset`: an object of its own, which lives as long as what is made from it."""
        return self.bytes[offset : offset + nbytes]

    def offset(self, tensor: Tensor) -> int | None:
        """Where the first element of `tensor` stands in the segment, if it does."""
        offset = tensor.data_ptr() - self._address
        return offset if 0 <= offset < self.size else None
