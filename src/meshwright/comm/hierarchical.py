"""A group over several hosts, each with several ranks, whose collectives send less between the hosts than within.

The ranks of a host are fast to reach for each other (shared memory), those of other hosts slow. With the ranks as a
table, an inner group is a row of it and an outer group a column:

    host 0    rank 0  rank 1  rank 2       all-reduce       inner reduce-scatter, outer all-reduce of the shard (1),
    host 1    rank 3  rank 4  rank 5                        inner all-gather
                                           reduce-scatter   inner, then outer (2)
                                           all-gather       outer, then inner (3)
                                           broadcast        down the source's column, then along each row (4)
                                           all-to-all       along the row to the right column, then down it (5)

So a host sends to another what its ranks have already combined, or what they then share out, and never the same
element twice. Not for GPUs: NCCL builds hierarchies of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import assert_never, final

import torch
from torch import Tensor

from meshwright.comm.group import CPU, CommunicationError, Done, Group, Handle, Reduction
from meshwright.comm.hosts import Hosts
from meshwright.comm.ledger import Entry, Kind, Ledger, Tally


@final
class Running:
    """A collective that the group's thread carries out; a `Handle`."""

    def __init__(self, future: Future[None], entry: Entry, where: str, ledger: Ledger) -> None:
        self._future: Future[None] | None = future
        self._entry = entry
        self._where = where
        self._ledger = ledger

    def wait(self) -> None:
        """Return when the result is there; a second call returns at once."""
        if self._future is None:
            return
        future, self._future = self._future, None
        begun = time.perf_counter()
        try:
            future.result()
        except CommunicationError as error:
            what = f"{self._where}: {self._entry.kind} of {self._entry.label}"
            waited = time.perf_counter() - begun
            raise CommunicationError(f"{what} failed after waiting {waited:.1f} s: {error}") from error
        self._ledger.waited(self._entry, time.perf_counter() - begun)


@final
class HierarchicalGroup(Group):
    """The group of `ranks`, of which `hosts` says which share a host, over this rank's row and column of the table.

    What it does is counted once, in `ledger`, as if it were flat; what its parts do, in their own ledgers.

    Args:
        axis: heading in the ledger.
        ranks: global ranks in the order of the axis.
        ledger: of this rank.
        hosts: of the group; as many ranks on each.
        inner: the ranks of this host, in the order of `hosts`, with a ledger of its own.
        outer: the ranks in the same place of each host, in the order of `hosts`, with a ledger of its own.

    The parts belong to a thread of this group, and nobody else may use them: one collective after the other runs there
    to its end, while the caller computes. That is also what keeps the calls of the parts in the same order on all
    ranks, whenever each of them waits.

    Raises ValueError if the hosts have different numbers of ranks.
    """

    def __init__(
        self, axis: str, ranks: tuple[int, ...], ledger: Ledger, hosts: Hosts, inner: Group, outer: Group
    ) -> None:
        if hosts.obstacle:
            raise ValueError(f"{axis} group {ranks}: {hosts.obstacle}")
        index = hosts.members[outer.index][inner.index]
        super().__init__(axis, ranks, index, ledger)
        assert inner.ranks == tuple(ranks[member] for member in hosts.inner(index)), (inner, hosts)
        assert outer.ranks == tuple(ranks[member] for member in hosts.outer(index)), (outer, hosts)
        assert len({id(ledger), id(inner.ledger), id(outer.ledger)}) == 3, "the parts are counted apart"
        self.hosts = hosts
        self.inner = inner
        self.outer = outer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{axis}-{index}")

    @property
    def between_hosts(self) -> Tally:
        """What this rank sent to other hosts, and how long it waited for them."""
        return self.outer.ledger.total()

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """See `Group`. What the ranks of this host handle best."""
        return self._thread.submit(self.inner.buffer, numel, dtype, device).result()

    def start_all_reduce(self, tensor: Tensor, *, label: str, reduction: Reduction = Reduction.SUM) -> Handle:
        """See `Group`."""
        self._check_contiguous(tensor, Kind.ALL_REDUCE, label)
        flat = tensor.data.view(-1)
        return self._start(Kind.ALL_REDUCE, label, flat, lambda: self._all_reduce(flat, label, reduction))

    def start_reduce_scatter(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """See `Group`."""
        self._check_shard(whole=source, shard=target, label=label)
        for tensor in (source, target):
            self._check_contiguous(tensor, Kind.REDUCE_SCATTER, label)
        whole, shard = source.data, target.data
        return self._start(Kind.REDUCE_SCATTER, label, whole, lambda: self._reduce_scatter(whole, shard, label))

    def start_all_gather(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """See `Group`."""
        self._check_shard(whole=target, shard=source, label=label)
        for tensor in (source, target):
            self._check_contiguous(tensor, Kind.ALL_GATHER, label)
        shard, whole = source.data, target.data
        return self._start(Kind.ALL_GATHER, label, whole, lambda: self._all_gather(shard, whole, label))

    def start_broadcast(self, tensor: Tensor, source: int, *, label: str) -> Handle:
        """See `Group`."""
        self._check_contiguous(tensor, Kind.BROADCAST, label)
        flat = tensor.data
        return self._start(Kind.BROADCAST, label, flat, lambda: self._broadcast(flat, source, label))

    def start_all_to_all(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """See `Group`."""
        self._check_exchange(source, target, label)
        given, taken = source.data, target.data
        return self._start(Kind.ALL_TO_ALL, label, given, lambda: self._all_to_all(given, taken, label))

    def barrier(self) -> None:
        """See `Group`."""
        entry = Entry(Kind.BARRIER, self.axis, "barrier")
        self.ledger.count(entry, 0, self.size)
        Running(self._thread.submit(self._barrier), entry, self.where, self.ledger).wait()

    def _start(self, kind: Kind, label: str, whole: Tensor, carry_out: Callable[[], None]) -> Handle:
        if whole.numel() == 0:
            return Done()
        entry = Entry(kind, self.axis, label)
        self.ledger.count(entry, whole.numel() * whole.element_size(), self.size)

        def run() -> None:
            with torch.inference_mode():  # the modes of the caller's thread do not reach this one
                carry_out()

        return Running(self._thread.submit(run), entry, self.where, self.ledger)

    # --- what runs in the group's thread -------------------------------------------------------------------------

    def _all_reduce(self, flat: Tensor, label: str, reduction: Reduction) -> None:
        whole = flat
        if flat.numel() % self.inner.size:  # no rank's shard may be longer than another's
            columns = -(-flat.numel() // self.inner.size)
            whole = flat.new_zeros(self.inner.size * columns)
            whole[: flat.numel()].copy_(flat)
        own = whole.view(self.inner.size, -1)[self.inner.index]
        match reduction:
            case Reduction.SUM:
                self.inner.reduce_scatter(whole, own, label=label)
            case Reduction.MAX:  # there is no reduce-scatter of maxima
                self.inner.all_reduce(whole, label=label, reduction=reduction)
            case _:
                assert_never(reduction)
        self.outer.all_reduce(own, label=label, reduction=reduction)  # (1)
        self.inner.all_gather(own, whole, label=label)
        if whole is not flat:
            flat.copy_(whole[: flat.numel()])

    def _reduce_scatter(self, source: Tensor, target: Tensor, label: str) -> None:
        rows = source.view(self.size, -1)
        sums = source.new_empty(self.outer.size, target.numel())
        handles = [
            self.inner.start_reduce_scatter(_rows(rows, members).view(-1), sums[host], label=label)
            for host, members in enumerate(self.hosts.members)
        ]
        for handle in handles:
            handle.wait()
        self.outer.reduce_scatter(sums.view(-1), target, label=label)  # (2)

    def _all_gather(self, source: Tensor, target: Tensor, label: str) -> None:
        rows = target.view(self.size, -1)
        parts = source.new_empty(self.outer.size, source.numel())
        self.outer.all_gather(source, parts.view(-1), label=label)  # (3)
        gathered = [_rows(rows, members) for members in self.hosts.members]
        handles = [
            self.inner.start_all_gather(part, whole.view(-1), label=label)
            for part, whole in zip(parts, gathered, strict=True)
        ]
        for handle, members, whole in zip(handles, self.hosts.members, gathered, strict=True):
            handle.wait()
            if not _consecutive(members):
                rows[list(members)] = whole

    def _broadcast(self, flat: Tensor, source: int, label: str) -> None:
        place = self.hosts.place(source)
        if self.inner.index == place.place:
            self.outer.broadcast(flat, place.host, label=label)  # (4)
        self.inner.broadcast(flat, place.place, label=label)

    def _all_to_all(self, source: Tensor, target: Tensor, label: str) -> None:
        members = torch.tensor(self.hosts.members)  # (hosts, places)
        crossing = source.view(self.size, -1)[members.t()].contiguous()  # by place on the host, for each host
        crossed = torch.empty_like(crossing)
        self.inner.all_to_all(crossing.view(-1), crossed.view(-1), label=label)
        leaving = crossed.transpose(0, 1).contiguous()  # by host, from each place here (5)
        arrived = torch.empty_like(leaving)
        self.outer.all_to_all(leaving.view(-1), arrived.view(-1), label=label)
        target.view(self.size, -1)[members] = arrived

    def _barrier(self) -> None:
        # Who meets in a column has met its row before; so all have come once all rows are met.
        self.inner.barrier()
        self.outer.barrier()


def _consecutive(members: tuple[int, ...]) -> bool:
    return members[-1] - members[0] == len(members) - 1


def _rows(rows: Tensor, members: tuple[int, ...]) -> Tensor:
    """The rows of the members of a host: in place where they follow each other, else a copy."""
    return rows[members[0] : members[-1] + 1] if _consecutive(members) else rows[list(members)]
