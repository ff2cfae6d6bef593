"""How each algorithm of `algorithms.py` carries out a collective on gloo.

A recipe sends all that it will send when it is started; what is left for later is this rank's alone. So ranks may wait
for several collectives in different orders. That is also why there is no all-reduce in two steps (sums, then a
gather): its second step would wait for whoever waits for something else first.

Values are summed in the order of the ranks, whenever they arrived: the same bits in every run and on every rank. Not
the groups that use the recipes: those check, count and name what they do (`torch_group.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.algorithms import Algorithm
from meshwright.comm.backend import Backend
from meshwright.comm.group import Reduction
from meshwright.comm.reduce import combine

_OPERATIONS = {Reduction.SUM: dist.ReduceOp.SUM, Reduction.MAX: dist.ReduceOp.MAX}


@dataclass(frozen=True)
class Started:
    """A collective under way: the works to wait for, and what this rank has to do when they are done."""

    works: Sequence[dist.Work]
    finish: Callable[[], None] | None = None

    def wait(self) -> None:
        """Return when all of it is done. Raises what gloo raises."""
        for work in self.works:
            work.wait()
        if self.finish is not None:
            self.finish()


class Spare:
    """Buffers kept between collectives: fresh memory costs a page fault every 4 KB, about as much as filling it.

    They serve calls within inference mode and outside of it, so they are made outside of it.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    @torch.inference_mode(False)
    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """A buffer of `rows` x `columns` elements with any values: the smallest there is, or a new one."""
        needed = rows * columns * dtype.itemsize
        fitting = [buffer for buffer in self._free if buffer.numel() >= needed]
        if fitting:
            buffer = min(fitting, key=Tensor.numel)
            self._free = [other for other in self._free if other is not buffer]
        else:  # what was too small this time will be too small the next time
            self._free.clear()
            buffer = torch.empty(needed, dtype=torch.uint8)
        return buffer[:needed].view(dtype).view(rows, columns)

    @torch.inference_mode(False)
    def give(self, taken: Tensor) -> None:
        """Take back what `take` gave."""
        self._free.append(torch.empty(0, dtype=torch.uint8).set_(taken.untyped_storage()))


class Recipes:
    """The collectives of one gloo backend, whose ranks all make the same calls in the same order."""

    def __init__(self, backend: Backend, index: int, size: int) -> None:
        self._backend = backend
        self._index = index
        self._size = size
        self._spare = Spare()

    def all_reduce(self, algorithm: Algorithm, tensor: Tensor, reduction: Reduction) -> Started:
        """Combine `tensor` (contiguous) over all ranks, in place."""
        flat = tensor.view(-1)
        match algorithm:
            case Algorithm.NATIVE:
                options = dist.AllreduceOptions()
                options.reduceOp = dist.ReduceOp(_OPERATIONS[reduction])
                return Started([self._backend.allreduce([tensor], options)])
            case Algorithm.MESSAGES:
                return self._combine_messages([flat] * self._size, flat, reduction)
            case Algorithm.ALL_TO_ALL | Algorithm.BROADCASTS:
                raise ValueError(f"there is no all-reduce by {algorithm}")
            case _:
                assert_never(algorithm)

    def reduce_scatter(self, algorithm: Algorithm, source: Tensor, target: Tensor) -> Started:
        """Sum `source` (1-D, n x c) over all ranks; this one's part into `target`, which may be that part of it."""
        match algorithm:
            case Algorithm.NATIVE:
                return Started([self._backend._reduce_scatter_base(target, source)])
            case Algorithm.ALL_TO_ALL:
                values = self._spare.take(self._size, target.numel(), source.dtype)
                work = self._backend.alltoall_base(values.view(-1), source, [], [], dist.AllToAllOptions())
                return Started([work], lambda: self._combine(values, list(values), target, Reduction.SUM))
            case Algorithm.MESSAGES:
                return self._combine_messages(list(source.view(self._size, -1)), target, Reduction.SUM)
            case Algorithm.BROADCASTS:
                raise ValueError(f"there is no reduce-scatter by {algorithm}")
            case _:
                assert_never(algorithm)

    def all_gather(self, algorithm: Algorithm, source: Tensor, target: Tensor) -> Started:
        """Place every rank's `source` (1-D, c) in `target` (1-D, n x c), of which it may be this one's part."""
        rows = list(target.view(self._size, -1))
        match algorithm:
            case Algorithm.NATIVE:
                return Started([self._backend._allgather_base(target, source)])
            case Algorithm.ALL_TO_ALL:
                copies = self._spare.take(self._size, source.numel(), source.dtype).copy_(source)
                work = self._backend.alltoall_base(target, copies.view(-1), [], [], dist.AllToAllOptions())
                return Started([work], lambda: self._spare.give(copies))
            case Algorithm.MESSAGES:
                self._place(source, rows)
                return Started(self._exchange([source] * self._size, rows))
            case Algorithm.BROADCASTS:
                self._place(source, rows)
                return Started([self._broadcast(row, index) for index, row in enumerate(rows)])
            case _:
                assert_never(algorithm)

    def all_to_all(self, source: Tensor, target: Tensor) -> Started:
        """Exchange equal parts; gloo's and NCCL's own are the quick ones."""
        return Started([self._backend.alltoall_base(target, source, [], [], dist.AllToAllOptions())])

    def broadcast(self, tensor: Tensor, source: int) -> Started:
        """Copy `tensor` from the rank `source` to all others, in place."""
        return Started([self._broadcast(tensor, source)])

    def _broadcast(self, tensor: Tensor, source: int) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        return self._backend.broadcast([tensor], options)

    def _place(self, source: Tensor, rows: Sequence[Tensor]) -> None:
        """Copy this rank's shard to its place, unless it stands there."""
        if rows[self._index].data_ptr() != source.data_ptr():
            rows[self._index].copy_(source)

    def _combine_messages(self, parts: Sequence[Tensor], target: Tensor, reduction: Reduction) -> Started:
        """Send `parts[i]` to rank i, and combine what arrives with this rank's own part into `target`."""
        received = self._spare.take(self._size, target.numel(), target.dtype)
        works = self._exchange(parts, list(received))
        rows = [parts[self._index] if index == self._index else row for index, row in enumerate(received)]
        return Started(works, lambda: self._combine(received, rows, target, reduction))

    def _combine(self, spare: Tensor, rows: Sequence[Tensor], target: Tensor, reduction: Reduction) -> None:
        combine(rows, target, reduction)
        self._spare.give(spare)

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[dist.Work]:
        """Send `outgoing[i]` to rank i and receive `incoming[i]` from it, for every i but this rank's own.

        The receives are posted first, so that gloo writes what arrives straight to its place.
        """
        works: list[dist.Work] = []
        for distance in range(1, self._size):
            peer = (self._index - distance) % self._size
            works.append(self._backend.recv([incoming[peer]], peer, 0))
        for distance in range(1, self._size):
            peer = (self._index + distance) % self._size
            works.append(self._backend.send([outgoing[peer]], peer, 0))
        return works
