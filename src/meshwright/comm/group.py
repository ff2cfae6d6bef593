"""A group of ranks along one axis of the mesh, and the collectives over it.

`Group` is the interface that every layer, optimizer and engine receives: they are handed their group and never look
one up. A group of size 1 is the ordinary case and not a branch: `SoloGroup` computes exactly what a collective over
one rank means (nothing moves, nothing is counted). The groups over torch's process groups stand in `torch_group.py`,
those over memory that the ranks of a host share in `shared/group.py`.

Every call has a `label` that says what it is for; it appears in the ledger and in every error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Protocol, final

import torch
from torch import Tensor

from meshwright.comm.ledger import Kind, Ledger

CPU = torch.device("cpu")


class Reduction(Enum):
    """How the ranks' values are combined."""

    SUM = "sum"
    MAX = "max"


class Handle(Protocol):
    """A communication under way; its tensors must not be touched before `wait` has returned."""

    def wait(self) -> None:
        """Return when the result is there. Raises CommunicationError naming rank, operation and peers."""


@final
class Done:
    """The handle of a communication that had nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""


class CommunicationError(RuntimeError):
    """A collective or message failed or timed out; the text names rank, operation, axis and peers."""


class MismatchError(RuntimeError):
    """The ranks of a group did not all do the same; the text names each rank and what it did. Not a lost peer."""


class Group(ABC):
    """Ranks that communicate along one axis.

    `ranks` are global ranks in the order of the axis, `index` is this process's place among them.
    """

    def __init__(self, axis: str, ranks: tuple[int, ...], index: int, ledger: Ledger) -> None:
        self.axis = axis
        self.ranks = ranks
        self.index = index
        self.ledger = ledger

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def where(self) -> str:
        """This rank and its group, for errors."""
        return f"rank {self.ranks[self.index]} in {self}"

    def __str__(self) -> str:
        return f"{self.axis} group {self.ranks}"

    @property
    def shares_memory(self) -> bool:
        """Whether the tensors of `buffer` and `whole` are memory that the members share."""
        return False

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """A 1-D tensor of undefined content that the collectives of this group handle best; meant to live long.

        Every member must ask for the same buffers in the same order. Where the members share memory, a reduction of
        (parts of) buffers reads them where they are.
        """
        return torch.empty(numel, dtype=dtype, device=device)

    def whole(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """A 1-D tensor of undefined content to gather into; where the members share memory, one memory for all of them.

        A collective call: every member makes it, in the same order. Where `shares_memory`, a member writes its own
        part only, and not while another may still read the old one; an all-gather from the members' own parts into the
        whole then moves nothing and says that all have written theirs. No other collective but a broadcast may work on
        it, and its storage cannot be resized.
        """
        return torch.empty(numel, dtype=dtype, device=device)

    @abstractmethod
    def start_all_reduce(self, tensor: Tensor, *, label: str, reduction: Reduction = Reduction.SUM) -> Handle:
        """Combine `tensor` (any shape, contiguous) over the group, in place on every rank.

        The sum of booleans is their "or".
        """

    @abstractmethod
    def start_reduce_scatter(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """Sum `source` (1-D, n x c elements) over the group; rank i receives elements [i c, (i+1) c) in `target`.

        `target` may be that very part of `source`; the rest of `source` is undefined afterwards.
        """

    @abstractmethod
    def start_all_gather(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """Place rank i's `source` (1-D, c elements) at [i c, (i+1) c) of every rank's `target` (1-D, n x c).

        `source` may be that very part of `target`.
        """

    @abstractmethod
    def start_broadcast(self, tensor: Tensor, source: int, *, label: str) -> Handle:
        """Copy `tensor` from the rank with index `source` in the group to all others, in place."""

    @abstractmethod
    def start_all_to_all(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """Send elements [i c, (i+1) c) of `source` (1-D, n x c) to rank i, which finds rank j's at [j c, (j+1) c).

        `target` (1-D, n x c) must not overlap `source`.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank of the group has called this."""

    @final
    def all_reduce(self, tensor: Tensor, *, label: str, reduction: Reduction = Reduction.SUM) -> None:
        """`start_all_reduce`, awaited."""
        self.start_all_reduce(tensor, label=label, reduction=reduction).wait()

    @final
    def reduce_scatter(self, source: Tensor, target: Tensor, *, label: str) -> None:
        """`start_reduce_scatter`, awaited."""
        self.start_reduce_scatter(source, target, label=label).wait()

    @final
    def all_gather(self, source: Tensor, target: Tensor, *, label: str) -> None:
        """`start_all_gather`, awaited."""
        self.start_all_gather(source, target, label=label).wait()

    @final
    def broadcast(self, tensor: Tensor, source: int, *, label: str) -> None:
        """`start_broadcast`, awaited."""
        self.start_broadcast(tensor, source, label=label).wait()

    @final
    def all_to_all(self, source: Tensor, target: Tensor, *, label: str) -> None:
        """`start_all_to_all`, awaited."""
        self.start_all_to_all(source, target, label=label).wait()

    def _check_exchange(self, source: Tensor, target: Tensor, label: str) -> None:
        if source.numel() != target.numel() or source.numel() % self.size or source.dtype != target.dtype:
            raise ValueError(
                f"{label} in {self}: {source.numel()} {source.dtype} elements cannot be exchanged for "
                f"{target.numel()} {target.dtype} elements in {self.size} equal parts"
            )
        for tensor in (source, target):
            self._check_contiguous(tensor, Kind.ALL_TO_ALL, label)

    def _check_contiguous(self, tensor: Tensor, kind: Kind, label: str) -> None:
        if not tensor.is_contiguous():
            raise ValueError(f"{kind} of {label}: the tensor {tuple(tensor.shape)} is not contiguous")

    def _check_shard(self, whole: Tensor, shard: Tensor, label: str) -> None:
        # A wrong size aborts the process inside gloo, and a wrong dtype gives garbage without an error.
        if whole.numel() != shard.numel() * self.size or whole.dtype != shard.dtype:
            raise ValueError(
                f"{label} in {self}: a shard of {shard.numel()} {shard.dtype} elements does not make "
                f"{whole.numel()} {whole.dtype} elements on {self.size} ranks"
            )


@final
class SoloGroup(Group):
    """The group of one rank: every collective is the identity, and nothing is sent or counted."""

    def __init__(self, axis: str, rank: int = 0, ledger: Ledger | None = None) -> None:
        super().__init__(axis, (rank,), 0, ledger or Ledger())

    def start_all_reduce(self, tensor: Tensor, *, label: str, reduction: Reduction = Reduction.SUM) -> Handle:
        """The sum or maximum over one rank is its value."""
        return Done()

    def start_reduce_scatter(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """The one shard is the whole."""
        return self._copy(source, target)

    def start_all_gather(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """The whole is the one shard."""
        return self._copy(source, target)

    def start_broadcast(self, tensor: Tensor, source: int, *, label: str) -> Handle:
        """The one rank has it already."""
        return Done()

    def start_all_to_all(self, source: Tensor, target: Tensor, *, label: str) -> Handle:
        """The one part stays here."""
        return self._copy(source, target)

    def barrier(self) -> None:
        """Nobody to wait for."""

    @staticmethod
    def _copy(source: Tensor, target: Tensor) -> Handle:
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
        return Done()
