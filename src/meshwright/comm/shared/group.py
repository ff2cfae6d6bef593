"""A group of CPU ranks on one host over shared memory, and the memory that makes its collectives quick."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from meshwright.comm.group import CPU, Done, Group, Handle, Reduction
from meshwright.comm.ledger import Entry, Kind, Ledger
from meshwright.comm.shared.board import Board
from meshwright.comm.shared.host import Host
from meshwright.comm.shared.member import Member
from meshwright.comm.shared.progress import Lane, Operation, Progress
from meshwright.comm.shared.signature import Signature
from meshwright.comm.shared.whole import WholeMemory


class SharedGroup(Group):
    """A group whose members see each other's memory. Only one thread of a process may use the groups of a mesh."""

    def __init__(
        self, axis: str, ranks: tuple[int, ...], index: int, ledger: Ledger, board: Board, progress: Progress
    ) -> None:
        super().__init__(axis, ranks, index, ledger)
        self._lane = Lane(progress, ledger, self.where)
        self._member = Member(board, str(self))
        self._host: Host = board.host
        self._wholes = WholeMemory(self._host.segment, self._host.arena, index, self.size)

    def start_all_reduce(self, tensor: Tensor, *, label: str, reduction: Reduction = Reduction.SUM) -> Handle:
        """See `Group`. The sum of booleans is "any"."""
        flat = self._flat(tensor, Kind.ALL_REDUCE, label)
        signature = Signature(Kind.ALL_REDUCE, label, flat.numel(), flat.dtype, reduction)
        return self._start(signature, flat, flat)

    def start_reduce_scatter(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """See `Group`. Without a copy if every member's `source` is in a `buffer`."""
        self._check_shard(whole=source, shard=target, label=label)
        whole, shard = (self._flat(each, Kind.REDUCE_SCATTER, label) for each in (source, target))
        return self._start(Signature(Kind.REDUCE_SCATTER, label, whole.numel(), whole.dtype), whole, shard)

    def start_all_gather(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """See `Group`. Without a copy if `target` is the same `whole` for all members, and `source` is in its place."""
        self._check_shard(whole=target, shard=source, label=label)
        shard, whole = (self._flat(each, Kind.ALL_GATHER, label) for each in (source, target))
        return self._start(Signature(Kind.ALL_GATHER, label, whole.numel(), whole.dtype), shard, whole)

    def start_broadcast(self, tensor: Tensor, source: int, *, label: str) -> Handle:
        """See `Group`."""
        flat = self._flat(tensor, Kind.BROADCAST, label)
        return self._start(Signature(Kind.BROADCAST, label, flat.numel(), flat.dtype, root=source), flat, flat)

    def start_all_to_all(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """See `Group`. Without a copy to staging if every member's `source` is in a `buffer`."""
        self._check_exchange(source, target, label)
        given, taken = (self._flat(each, Kind.ALL_TO_ALL, label) for each in (source, target))
        return self._start(Signature(Kind.ALL_TO_ALL, label, given.numel(), given.dtype), given, taken)

    def barrier(self) -> None:
        """See `Group`."""
        entry = Entry(Kind.BARRIER, self.axis, "barrier")
        self.ledger.count(entry, 0, self.size)
        nothing = torch.empty(0, dtype=torch.uint8)
        self._operation(Signature(Kind.BARRIER, "barrier", 0, torch.uint8), nothing, nothing, entry).wait()

    @property
    def shares_memory(self) -> bool:
        """See `Group`."""
        return True

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """See `Group`. It lies in this rank's part of the shared memory until the last tensor that uses it is gone."""
        assert device.type == "cpu", device
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        arena, nbytes = self._host.arena, numel * dtype.itemsize
        offset = arena.take(nbytes)
        memory = self._host.segment.part(offset, nbytes)
        weakref.finalize(memory, arena.give, offset).atexit = False
        return torch.frombuffer(memory, dtype=dtype)

    def whole(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """See `Group`. It is free again when no member has a tensor that uses it."""
        assert device.type == "cpu", device
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = numel * dtype.itemsize
        offset = torch.tensor([self._wholes.make(nbytes) if self.index == 0 else 0])
        signature = Signature(Kind.BROADCAST, f"a whole of {numel} {dtype}", 1, torch.int64)
        self._operation(signature, offset, offset, Entry(Kind.BROADCAST, self.axis, "whole")).complete()
        return torch.frombuffer(self._wholes.use(int(offset), nbytes), dtype=dtype)

    def _start(self, signature: Signature, source: Tensor, target: Tensor) -> Handle:
        if signature.numel == 0:
            return Done()
        entry = Entry(signature.kind, self.axis, signature.label)
        self.ledger.count(entry, signature.numel * source.element_size(), self.size)
        return self._operation(signature, source, target, entry)

    def _operation(self, signature: Signature, source: Tensor, target: Tensor, entry: Entry) -> Operation:
        return self._lane.start(self._member.start(signature, source, target), entry)

    def _flat(self, tensor: Tensor, kind: Kind, label: str) -> Tensor:
        """The elements in one row, through an alias that autograd does not watch: peers write memory, not tensors."""
        self._check_contiguous(tensor, kind, label)
        return tensor.data.view(-1)
