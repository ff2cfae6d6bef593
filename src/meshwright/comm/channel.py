"""Directed first-in-first-out messages between the ranks of a pipeline.

Each kind of traffic (activations downwards, gradients upwards) has a channel of its own, so no message waits behind
another kind. Shapes and dtypes are known to both ends before a message travels: the schedule says which micro-batch
comes next (`Schedule.check` proves that it is the one that was sent), and the stage says how large it is.

`Channel` is the interface; the channels over torch's backends stand in `torch_channel.py`, those over shared memory in
`shared/channel.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from torch import Tensor

from meshwright.comm.group import Done, Handle
from meshwright.comm.ledger import Entry, Kind, Ledger


class Channel(ABC):
    """One kind of traffic along a pipeline axis whose global ranks are `ranks`; this process is `ranks[index]`."""

    def __init__(self, label: str, ranks: tuple[int, ...], index: int, ledger: Ledger) -> None:
        self.label = label
        self.ranks = ranks
        self.index = index
        self.ledger = ledger

    @final
    def send(self, tensor: Tensor, peer: int) -> Handle:
        """Send `tensor` (contiguous) to the pipeline rank `peer`; it must not change until the handle was awaited."""
        if tensor.numel() == 0:  # both ends know the size: an empty micro-batch needs no message
            return Done()
        entry = self._count(Kind.SEND, tensor)
        return self._send(tensor.data.view(-1), peer, entry)

    @final
    def receive(self, tensor: Tensor, peer: int) -> Handle:
        """Receive the next message of the pipeline rank `peer` into `tensor`, which has its size and dtype."""
        if tensor.numel() == 0:
            return Done()
        entry = self._count(Kind.RECEIVE, tensor)
        return self._receive(tensor.data.view(-1), peer, entry)

    @abstractmethod
    def _send(self, flat: Tensor, peer: int, entry: Entry) -> Handle:
        """Send a 1-D tensor of at least one element, which was counted under `entry`."""

    @abstractmethod
    def _receive(self, flat: Tensor, peer: int, entry: Entry) -> Handle:
        """Receive into such a tensor."""

    def _count(self, kind: Kind, tensor: Tensor) -> Entry:
        if not tensor.is_contiguous():
            raise ValueError(f"{kind} of {self.label}: the tensor {tuple(tensor.shape)} is not contiguous")
        entry = Entry(kind, "pipeline", self.label)
        self.ledger.count(entry, tensor.numel() * tensor.element_size(), 2)
        return entry

    def _where(self, direction: str, peer: int) -> str:
        """For errors: this rank, "to" or "from", and the other."""
        return f"rank {self.ranks[self.index]} {direction} rank {self.ranks[peer]}"


@final
class SoloChannel(Channel):
    """The channel of a pipeline of one stage, which sends no message that is not empty."""

    def _send(self, flat: Tensor, peer: int, entry: Entry) -> Handle:
        raise AssertionError("a pipeline of one stage sends no message")

    def _receive(self, flat: Tensor, peer: int, entry: Entry) -> Handle:
        raise AssertionError("a pipeline of one stage receives no message")
