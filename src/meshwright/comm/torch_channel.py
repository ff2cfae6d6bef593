"""Channels over torch's process groups, each over a backend of its own."""

from __future__ import annotations

from torch import Tensor

from meshwright.comm.backend import Backend
from meshwright.comm.channel import Channel
from meshwright.comm.group import Handle
from meshwright.comm.ledger import Entry, Ledger
from meshwright.comm.torch_group import Pending


class TorchChannel(Channel):
    """A channel whose messages are those of a gloo or NCCL backend made for exactly these ranks."""

    def __init__(self, label: str, ranks: tuple[int, ...], index: int, ledger: Ledger, backend: Backend) -> None:
        super().__init__(label, ranks, index, ledger)
        self._backend = backend

    def _send(self, flat: Tensor, peer: int, entry: Entry) -> Handle:
        return Pending([self._backend.send([flat], peer, 0)], entry, self._where("to", peer), self.ledger)

    def _receive(self, flat: Tensor, peer: int, entry: Entry) -> Handle:
        return Pending([self._backend.recv([flat], peer, 0)], entry, self._where("from", peer), self.ledger)
