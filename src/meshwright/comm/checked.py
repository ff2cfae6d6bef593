"""Debug mode: before each collective, the ranks of its group compare what they are about to call.

Ranks that call different things compute garbage, abort inside the backend, or wait for each other until the time-out,
often far from the mistake. A `CheckedGroup` finds out before anything is sent: every call costs one small all-gather
of digests more (in the ledger under the label `SIGNATURE`), and where digests differ, the calls' texts are exchanged
through the store and every rank raises the same `MismatchError`.

Not for messages: which of them belong together is proven before the run (`Schedule.check`). And not the handshake,
which compares what is about to be run, once (`handshake.py`).
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.group import CPU, CommunicationError, Group, Handle, MismatchError, Reduction
from meshwright.comm.ledger import Kind

SIGNATURE = "signature"
"""The ledger's label for the exchange of digests."""

# Frames that are never the place a call is looked for at: this package, and autograd, which calls it back.
_BETWEEN = ("meshwright.comm", "torch")


@dataclass(frozen=True)
class Site:
    """A place in the source."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def short(self) -> str:
        """The same on hosts that keep the source in different folders."""
        return f"{Path(self.file).name}:{self.line}"


@dataclass(frozen=True)
class Signature:
    """A call as the ranks compare it: what, what for, its tensors in words, how or from whom, and from where."""

    kind: str
    label: str
    tensors: tuple[str, ...]
    detail: str
    site: Site

    def __str__(self) -> str:
        call = f"{self.kind} of {self.label}" if self.label else self.kind
        return ", ".join([f"{call}{self.detail}", *self.tensors]) + f", at {self.site}"

    @property
    def digest(self) -> int:
        """64 bits that differ where the calls do."""
        compared = repr((self.kind, self.label, self.tensors, self.detail, self.site.short))
        return int.from_bytes(hashlib.blake2b(compared.encode(), digest_size=8).digest(), "little", signed=True)


@final
class CheckedGroup(Group):
    """`inner`, each of whose collectives runs only when all ranks call the same.

    Args:
        inner: the group that carries out the collectives, and the exchange of digests.
        store: where ranks that differ read each other's calls; one for all groups will do.
        device: where the digests stand: the device of the tensors that `inner` takes.
        timeout: seconds to wait for the other ranks' texts once digests differ.

    Raises, from every collective:
        MismatchError: kind, label, shape, dtype, reduction or source, or the calling line differ, on every rank.
        CommunicationError: a rank of the group called nothing in time.
    """

    def __init__(
        self,
        inner: Group,
        store: dist.Store,
        device: torch.device = CPU,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(inner.axis, inner.ranks, inner.index, inner.ledger)
        self.inner = inner
        self._store = dist.PrefixStore(SIGNATURE, store)
        self._device = device
        self._timeout = timedelta(seconds=timeout)

    @property
    def shares_memory(self) -> bool:
        """See `Group`."""
        return self.inner.shares_memory

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """See `Group`."""
        return self.inner.buffer(numel, dtype, device)

    def whole(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """See `Group`."""
        self._compare("whole", "", (), f" of {numel} {_name(dtype)}")
        return self.inner.whole(numel, dtype, device)

    def start_all_reduce(self, tensor: Tensor, *, label: str, reduction: Reduction = Reduction.SUM) -> Handle:
        """See `Group`."""
        self._compare(Kind.ALL_REDUCE, label, (tensor,), f" ({reduction.value})")
        return self.inner.start_all_reduce(tensor, label=label, reduction=reduction)

    def start_reduce_scatter(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """See `Group`."""
        self._compare(Kind.REDUCE_SCATTER, label, (source, target))
        return self.inner.start_reduce_scatter(source, target, label=label)

    def start_all_gather(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """See `Group`."""
        self._compare(Kind.ALL_GATHER, label, (source, target))
        return self.inner.start_all_gather(source, target, label=label)

    def start_broadcast(self, tensor: Tensor, source: int, *, label: str) -> Handle:
        """See `Group`."""
        self._compare(Kind.BROADCAST, label, (tensor,), f" from index {source}")
        return self.inner.start_broadcast(tensor, source, label=label)

    def start_all_to_all(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """See `Group`."""
        self._compare(Kind.ALL_TO_ALL, label, (source, target))
        return self.inner.start_all_to_all(source, target, label=label)

    def barrier(self) -> None:
        """See `Group`."""
        self._compare(Kind.BARRIER, "", ())
        self.inner.barrier()

    def _compare(self, kind: str, label: str, tensors: tuple[Tensor, ...], detail: str = "") -> None:
        own = Signature(kind, label, tuple(map(_in_words, tensors)), detail, call_site())
        mine = torch.tensor([own.digest], device=self._device)
        everyones = torch.empty(self.size, dtype=torch.int64, device=self._device)
        try:
            self.inner.all_gather(mine, everyones, label=SIGNATURE)
        except CommunicationError as error:
            raise CommunicationError(f"{self.where} waited for the other ranks to call\n  {own}\n{error}") from error
        digests: list[int] = everyones.tolist()
        if len(set(digests)) > 1:
            raise MismatchError(self._difference(own, digests))

    def _difference(self, own: Signature, digests: list[int]) -> str:
        """Each call that differs, and its ranks. A text is found in the store under its own digest."""
        callers: dict[int, list[int]] = {}
        for rank, digest in zip(self.ranks, digests, strict=True):
            callers.setdefault(digest, []).append(rank)
        self._store.set(str(own.digest), str(own))
        keys = [str(digest) for digest in callers]
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError as error:
            raise CommunicationError(f"{self}: the ranks call different things; this one\n  {own}") from error
        lines = [
            f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {self._store.get(key).decode()}"
            for key, ranks in zip(keys, callers.values(), strict=True)
        ]
        return "\n".join([f"the ranks of {self} call different things:", *lines])


def call_site() -> Site:
    """The line that called into `meshwright.comm`: the innermost one outside of it and of torch."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        package = frame.f_globals.get("__name__", "")
        if not any(package == between or package.startswith(f"{between}.") for between in _BETWEEN):
            return Site(frame.f_code.co_filename, frame.f_lineno)
    return Site("(autograd)", 0)  # on a GPU the backward pass runs in a thread that nobody's line called


def _in_words(tensor: Tensor) -> str:
    """Shape and dtype; a tensor with gaps is not taken by every collective, so that counts too."""
    gaps = "" if tensor.is_contiguous() else " with gaps"
    return f"{tuple(tensor.shape)} {_name(tensor.dtype)}{gaps}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
