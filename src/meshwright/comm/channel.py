"""Directed first-in-first-out messages between the ranks of a pipeline.

Each kind of traffic (activations downwards, gradients upwards) has a channel of its own over a process group of its
own, so no message waits behind another kind. Shapes and dtypes are known to both ends before a message travels: the
schedule says which micro-batch comes next (`Schedule.check` proves that it is the one that was sent), and the stage
says how large it is.
"""

from __future__ import annotations

from torch import Tensor

from meshwright.comm.backend import Backend
from meshwright.comm.group import Done, Handle
from meshwright.comm.ledger import Entry, Kind, Ledger
from meshwright.comm.torch_group import Pending, payload


class Channel:
    """One kind of traffic along a pipeline axis whose global ranks are `ranks`; this process is `ranks[index]`."""

    def __init__(self, label: str, ranks: tuple[int, ...], index: int, ledger: Ledger, backend: Backend | None) -> None:
        self.label = label
        self.ranks = ranks
        self.index = index
        self.ledger = ledger
        self._backend = backend

    def send(self, tensor: Tensor, peer: int) -> Handle:
        """Send `tensor` (contiguous) to the pipeline rank `peer`; it must not change until the handle was awaited."""
        return self._start(Kind.SEND, tensor, peer)

    def receive(self, tensor: Tensor, peer: int) -> Handle:
        """Receive the next message of the pipeline rank `peer` into `tensor`, which has its shape and dtype."""
        return self._start(Kind.RECEIVE, tensor, peer)

    def _start(self, kind: Kind, tensor: Tensor, peer: int) -> Handle:
        if tensor.numel() == 0:  # both ends know the size: an empty micro-batch needs no message
            return Done()
        assert self._backend is not None, "a pipeline of one stage sends no message"
        entry = Entry(kind, "pipeline", self.label)
        self.ledger.count(entry, payload(tensor), 2)
        start = self._backend.send if kind is Kind.SEND else self._backend.recv
        direction = "to" if kind is Kind.SEND else "from"
        where = f"rank {self.ranks[self.index]} {direction} rank {self.ranks[peer]}"
        return Pending([start([tensor], peer, 0)], entry, where, self.ledger)
