"""Groups over torch's process groups: gloo between CPU processes, NCCL between GPUs.

The backends are used as objects and not through `torch.distributed`'s global registry, so any number of meshes can
live in one process, and a restart or a test gets fresh ones from its own part of the store.

Gloo's own reduce-scatter and all-gather take up to four times what the same bytes take otherwise (64 MB, two ranks: 127
against 33 ms, and 101 against 24 ms), so a measured table says how each collective is carried out (`algorithms.py`,
`recipes.py`). NCCL's own are the quick ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.algorithms import Algorithm, choose
from meshwright.comm.backend import Backend
from meshwright.comm.group import CommunicationError, Done, Group, Handle, Reduction
from meshwright.comm.ledger import Entry, Kind, Ledger
from meshwright.comm.recipes import Recipes, Started


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
        self._native = native
        self._recipes = Recipes(backend, index, len(ranks))

    def start_all_reduce(self, tensor: Tensor, *, label: str, reduction: Reduction = Reduction.SUM) -> Handle:
        """See `Group`."""
        self._check_contiguous(tensor, Kind.ALL_REDUCE, label)
        if tensor.numel() == 0:
            return Done()
        if tensor.dtype is torch.bool:  # "or", which as a sum would leave a byte that is neither 0 nor 1
            tensor, reduction = tensor.view(torch.uint8), Reduction.MAX
        started = self._recipes.all_reduce(self._algorithm(Kind.ALL_REDUCE, tensor), tensor, reduction)
        return self._pending(started, Kind.ALL_REDUCE, label, tensor)

    def start_reduce_scatter(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """See `Group`."""
        self._check_shard(whole=source, shard=target, label=label)
        for tensor in (source, target):
            self._check_contiguous(tensor, Kind.REDUCE_SCATTER, label)
        if source.numel() == 0:
            return Done()
        started = self._recipes.reduce_scatter(self._algorithm(Kind.REDUCE_SCATTER, source), source, target)
        return self._pending(started, Kind.REDUCE_SCATTER, label, source)

    def start_all_gather(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """See `Group`."""
        self._check_shard(whole=target, shard=source, label=label)
        for tensor in (source, target):
            self._check_contiguous(tensor, Kind.ALL_GATHER, label)
        if target.numel() == 0:
            return Done()
        started = self._recipes.all_gather(self._algorithm(Kind.ALL_GATHER, target), source, target)
        return self._pending(started, Kind.ALL_GATHER, label, target)

    def start_broadcast(self, tensor: Tensor, source: int, *, label: str) -> Handle:
        """See `Group`."""
        self._check_contiguous(tensor, Kind.BROADCAST, label)
        if tensor.numel() == 0:
            return Done()
        return self._pending(self._recipes.broadcast(tensor, source), Kind.BROADCAST, label, tensor)

    def start_all_to_all(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """See `Group`."""
        self._check_exchange(source, target, label)
        if source.numel() == 0:
            return Done()
        return self._pending(self._recipes.all_to_all(source, target), Kind.ALL_TO_ALL, label, source)

    def barrier(self) -> None:
        """See `Group`."""
        entry = Entry(Kind.BARRIER, self.axis, "barrier")
        self.ledger.count(entry, 0, self.size)
        Pending([self._backend.barrier()], entry, self.where, self.ledger).wait()

    def _algorithm(self, kind: Kind, whole: Tensor) -> Algorithm:
        return Algorithm.NATIVE if self._native else choose(kind, payload(whole), self.size)

    def _pending(self, started: Started, kind: Kind, label: str, whole: Tensor) -> Handle:
        entry = Entry(kind, self.axis, label)
        self.ledger.count(entry, payload(whole), self.size)
        return Pending(started.works, entry, self.where, self.ledger, started.finish)
