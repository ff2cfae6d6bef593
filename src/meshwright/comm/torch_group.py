"""Groups over torch's process groups: gloo between CPU processes, NCCL between GPUs.

The backends are used as objects and not through `torch.distributed`'s global registry, so any number of meshes can
live in one process, and a restart or a test gets fresh ones from its own part of the store.

On gloo the native reduce-scatter and all-gather cost about twice what the same bytes cost otherwise (64 MB, two
ranks: 71 against 25 ms, and 54 against 19 ms), so they are built here from an all-to-all with a local sum, and from
messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.backend import Backend
from meshwright.comm.group import CommunicationError, Done, Group, Handle, Reduction
from meshwright.comm.ledger import Entry, Kind, Ledger

_OPERATIONS = {Reduction.SUM: dist.ReduceOp.SUM, Reduction.MAX: dist.ReduceOp.MAX}


@final
class Pending:
    """A communication under way on a backend: its works, what follows them, and what to say if they fail."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        entry: Entry,
        where: str,
        ledger: Ledger,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._works = works
        self._entry = entry
        self._where = where
        self._ledger = ledger
        self._finish = finish

    def wait(self) -> None:
        """Return when the result is there; a second call returns at once."""
        if not self._works:
            return
        begun = time.perf_counter()
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            waited = time.perf_counter() - begun
            reason = str(error).splitlines()[0]
            what = f"{self._where}: {self._entry.kind} of {self._entry.label}"
            raise CommunicationError(f"{what} failed after waiting {waited:.1f} s: {reason}") from error
        self._ledger.waited(self._entry, time.perf_counter() - begun)
        if self._finish is not None:
            self._finish()
        self._works, self._finish = (), None


def payload(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


class TorchGroup(Group):
    """A group whose collectives run on a gloo or NCCL backend made for exactly these ranks."""

    def __init__(
        self, axis: str, ranks: tuple[int, ...], index: int, ledger: Ledger, backend: Backend, native: bool
    ) -> None:
        super().__init__(axis, ranks, index, ledger)
        self._backend = backend
        # NCCL's own reduce-scatter and all-gather are the quick ones; gloo's are not.
        self._native = native

    def start_all_reduce(self, tensor: Tensor, *, label: str, reduction: Reduction = Reduction.SUM) -> Handle:
        """See `Group`."""
        if not tensor.is_contiguous():
            raise ValueError(f"all-reduce of {label}: the tensor {tuple(tensor.shape)} is not contiguous")
        if tensor.numel() == 0:
            return Done()
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(_OPERATIONS[reduction])
        return self._pending([self._backend.allreduce([tensor], options)], Kind.ALL_REDUCE, label, tensor)

    def start_reduce_scatter(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """See `Group`."""
        self._check_shard(whole=source, shard=target, label=label)
        if source.numel() == 0:
            return Done()
        if self._native:
            work = self._backend._reduce_scatter_base(target, source)
            return self._pending([work], Kind.REDUCE_SCATTER, label, source)
        parts = torch.empty_like(source)
        work = self._backend.alltoall_base(parts, source, [], [], dist.AllToAllOptions())
        # The parts are summed in the order of the ranks, whenever they arrived: the same bits in every run.
        return self._pending(
            [work], Kind.REDUCE_SCATTER, label, source, lambda: torch.sum(parts.view(self.size, -1), 0, out=target)
        )

    def start_all_gather(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """See `Group`."""
        self._check_shard(whole=target, shard=source, label=label)
        if target.numel() == 0:
            return Done()
        if self._native:
            work = self._backend._allgather_base(target, source)
            return self._pending([work], Kind.ALL_GATHER, label, target)
        shards = target.view(self.size, -1)
        if shards[self.index].data_ptr() != source.data_ptr():
            shards[self.index].copy_(source)
        works: list[dist.Work] = []
        for distance in range(1, self.size):
            peer = (self.index - distance) % self.size
            works.append(self._backend.recv([shards[peer]], peer, 0))
        for distance in range(1, self.size):
            works.append(self._backend.send([shards[self.index]], (self.index + distance) % self.size, 0))
        return self._pending(works, Kind.ALL_GATHER, label, target)

    def start_broadcast(self, tensor: Tensor, source: int, *, label: str) -> Handle:
        """See `Group`."""
        if tensor.numel() == 0:
            return Done()
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        return self._pending([self._backend.broadcast([tensor], options)], Kind.BROADCAST, label, tensor)

    def barrier(self) -> None:
        """See `Group`."""
        entry = Entry(Kind.BARRIER, self.axis, "barrier")
        self.ledger.count(entry, 0, self.size)
        Pending([self._backend.barrier()], entry, self._where(), self.ledger).wait()

    def _pending(
        self,
        works: Sequence[dist.Work],
        kind: Kind,
        label: str,
        whole: Tensor,
        finish: Callable[[], object] | None = None,
    ) -> Handle:
        entry = Entry(kind, self.axis, label)
        self.ledger.count(entry, payload(whole), self.size)
        return Pending(works, entry, self._where(), self.ledger, finish)

    def _where(self) -> str:
        return f"rank {self.ranks[self.index]} in {self}"

    def _check_shard(self, whole: Tensor, shard: Tensor, label: str) -> None:
        # A wrong size aborts the process inside gloo, and a wrong dtype gives garbage without an error.
        if whole.numel() != shard.numel() * self.size or whole.dtype != shard.dtype:
            raise ValueError(
                f"{label} in {self}: a shard of {shard.numel()} {shard.dtype} elements does not make "
                f"{whole.numel()} {whole.dtype} elements on {self.size} ranks"
            )
