"""From a mesh and a `Start` to the live groups of one rank: the store, the backends, the handshake.

Every group takes its own prefix in the store, below one for the attempt, so restarts and several meshes never meet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from meshwright.comm.backend import Backend, gloo, gloo_device, nccl
from meshwright.comm.channel import Channel
from meshwright.comm.group import Group, SoloGroup
from meshwright.comm.handshake import agree
from meshwright.comm.ledger import Ledger
from meshwright.comm.start import Start
from meshwright.comm.torch_group import TorchGroup
from meshwright.layout.mesh import Axis, Mesh


@dataclass(frozen=True)
class Wiring:
    """What new groups are made from: the store of this attempt, the device that decides the backend, the time-out.

    `made` keeps the groups among stages, by name: a second engine on the same mesh must not meet the first one's
    entries in the store.
    """

    store: dist.Store
    device: torch.device
    timeout: float
    local: bool
    made: dict[str, Group] = field(default_factory=dict)

    def backend(self, name: str, index: int, size: int) -> Backend:
        """A gloo or NCCL backend for `size` ranks that all call this with the same `name`."""
        store = dist.PrefixStore(name, self.store)
        if self.device.type == "cuda":
            return nccl(store, index, size, self.timeout)
        device = gloo_device(self.local, os.environ.get("GLOO_SOCKET_IFNAME", ""))
        return gloo(store, index, size, device, self.timeout)


@dataclass(frozen=True)
class Groups:
    """The groups of one rank along each axis of its mesh, its two pipeline channels, and the ledger they share."""

    mesh: Mesh
    rank: int
    device: torch.device
    ledger: Ledger
    world: Group
    data: Group
    pipeline: Group
    tensor: Group
    activations: Channel
    gradients: Channel
    wiring: Wiring | None

    def among_stages(self, name: str, stages: tuple[int, ...]) -> Group:
        """A group of the pipeline ranks `stages` in this rank's own pipeline; only those ranks may call it."""
        ranks = tuple(self.pipeline.ranks[stage] for stage in stages)
        if len(ranks) == 1:
            return SoloGroup(name, self.rank, self.ledger)
        assert self.wiring is not None, "a mesh of one rank has one stage"
        key = f"{name}-{ranks}"
        if key not in self.wiring.made:
            self.wiring.made[key] = _group(self.wiring, name, ranks, self.rank, self.ledger)
        return self.wiring.made[key]

    def agree(self, statement: Mapping[str, str]) -> None:
        """The handshake: see `comm.handshake.agree`."""
        if self.wiring is not None:
            agree(self.wiring.store, self.rank, self.mesh.size, statement, self.wiring.timeout)


def solo(device: torch.device | None = None) -> Groups:
    """The groups of a mesh of one rank: nothing is connected."""
    ledger = Ledger()
    return _assemble(Mesh(), 0, device or torch.device("cpu"), ledger, None)


def connect(mesh: Mesh, start: Start, device: torch.device, timeout: float = 60.0) -> Groups:
    """Connect this process, as the rank `start` says it is, to the others of `mesh`.

    Every wait in the groups ends after `timeout` seconds with an error that names rank and operation.

    Raises:
        ValueError: the mesh needs another number of ranks than were started.
    """
    if mesh.size != start.ranks:
        raise ValueError(
            f"the layout needs {mesh.size} ranks (data {mesh.data} x pipeline {mesh.pipeline} x tensor {mesh.tensor}), "
            f"but {start.ranks} were started"
        )
    if mesh.size == 1:
        return solo(device)
    store = dist.PrefixStore(f"attempt-{start.attempt}", _store(start, timeout))
    local = start.local_ranks == start.ranks
    return _assemble(mesh, start.rank, device, Ledger(), Wiring(store, device, timeout, local))


def _store(start: Start, timeout: float) -> dist.Store:
    """The key-value store where the ranks of one run find each other."""
    address = urlparse(start.rendezvous)
    if address.scheme == "file":
        store: dist.Store = dist.FileStore(address.path, start.ranks)
        store.set_timeout(timedelta(seconds=timeout))
        return store
    assert address.scheme == "tcp" and address.hostname and address.port, start.rendezvous
    serves = start.rank == 0 and not start.agent_store
    return dist.TCPStore(
        address.hostname, address.port, start.ranks, serves, timedelta(seconds=timeout), wait_for_workers=False
    )


def _assemble(mesh: Mesh, rank: int, device: torch.device, ledger: Ledger, wiring: Wiring | None) -> Groups:
    along = {axis: _group(wiring, axis.value, mesh.group(axis, rank), rank, ledger) for axis in Axis}
    line = along[Axis.PIPELINE]
    channels = []
    for label in ("activations", "gradients"):
        backend = None
        if wiring is not None and line.size > 1:
            backend = wiring.backend(f"{label}-{line.ranks[0]}", line.index, line.size)
        channels.append(Channel(label, line.ranks, line.index, ledger, backend))
    return Groups(
        mesh=mesh,
        rank=rank,
        device=device,
        ledger=ledger,
        world=_group(wiring, "world", tuple(range(mesh.size)), rank, ledger),
        data=along[Axis.DATA],
        pipeline=line,
        tensor=along[Axis.TENSOR],
        activations=channels[0],
        gradients=channels[1],
        wiring=wiring,
    )


def _group(wiring: Wiring | None, name: str, ranks: tuple[int, ...], rank: int, ledger: Ledger) -> Group:
    if len(ranks) == 1 or wiring is None:
        return SoloGroup(name, rank, ledger)
    index = ranks.index(rank)
    backend = wiring.backend(f"{name}-{ranks[0]}-{ranks[-1]}", index, len(ranks))
    return TorchGroup(name, ranks, index, ledger, backend, native=wiring.device.type == "cuda")
