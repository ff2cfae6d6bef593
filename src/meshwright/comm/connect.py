"""From a mesh and a `Start` to the live groups of one rank: the store, the groups and channels, the handshake.

Every group takes its own prefix in the store, below one for the attempt, so restarts and several meshes never meet.
What carries a group is decided in `wiring`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from meshwright.comm.channel import Channel, SoloChannel
from meshwright.comm.group import Group, SoloGroup
from meshwright.comm.handshake import agree
from meshwright.comm.ledger import Ledger
from meshwright.comm.start import Start
from meshwright.comm.wiring import Transport, Wiring, wire
from meshwright.layout.mesh import Axis, Mesh


@dataclass(frozen=True)
class Groups:
    """The groups of one rank along each axis of its mesh, its two pipeline channels, and the ledger they share.

    `shards` and `replicas` divide the data axis (HSDP, see `layout.mesh`): the ranks that divide the model states among
    them, and those that hold the same part. As connected, the first is the data group and the second this rank alone;
    `sharded` makes others.
    """

    mesh: Mesh
    rank: int
    device: torch.device
    ledger: Ledger
    world: Group
    data: Group
    shards: Group
    replicas: Group
    pipeline: Group
    tensor: Group
    activations: Channel
    gradients: Channel
    wiring: Wiring | None

    def sharded(self, shards: int) -> Groups:
        """The same groups with the data axis in runs of `shards` ranks. Every rank must call it, with the same number.

        Raises ValueError where `shards` does not divide the data axis.
        """
        run, peers = self.mesh.shard_group(self.rank, shards), self.mesh.replica_group(self.rank, shards)
        over = self.data if run == self.data.ranks else self._made("shard", run)
        return replace(self, shards=over, replicas=self._made("replica", peers))

    def gathers(self) -> Group:
        """A second group of the ranks of `shards`: what is gathered on it does not wait for reductions on the first.

        Every rank of `shards` must call it.
        """
        return self._made("gather", self.shards.ranks)

    def among_stages(self, name: str, stages: tuple[int, ...]) -> Group:
        """A group of the pipeline ranks `stages` in this rank's own pipeline; only those ranks may call it."""
        return self._made(name, tuple(self.pipeline.ranks[stage] for stage in stages))

    def _made(self, name: str, ranks: tuple[int, ...]) -> Group:
        """The group of `ranks`, of which this is one; the same one however often it is asked for."""
        if len(ranks) == 1:
            return SoloGroup(name, self.rank, self.ledger)
        assert self.wiring is not None, "a mesh of one rank has groups of one rank"
        key = f"{name}-{ranks}"
        if key not in self.wiring.made:
            self.wiring.made[key] = self.wiring.group(name, ranks, self.rank, self.ledger)
        return self.wiring.made[key]

    def agree(self, statement: Mapping[str, str]) -> None:
        """The handshake: see `comm.handshake.agree`."""
        if self.wiring is not None:
            agree(self.wiring.store, self.rank, self.mesh.size, statement, self.wiring.timeout)


def solo(device: torch.device | None = None) -> Groups:
    """The groups of a mesh of one rank: nothing is connected."""
    ledger = Ledger()
    return _assemble(Mesh(), 0, device or torch.device("cpu"), ledger, None)


def connect(
    mesh: Mesh,
    start: Start,
    device: torch.device,
    timeout: float = 60.0,
    transport: str = Transport.AUTO,
    debug: bool = False,
) -> Groups:
    """Connect this process, as the rank `start` says it is, to the others of `mesh`.

    Every wait in the groups ends after `timeout` seconds with an error that names rank and operation.

    Args:
        mesh: of all ranks.
        start: this process's place.
        device: of the tensors that will be communicated.
        timeout: seconds.
        transport: between CPU ranks: "shared" memory of one host, "gloo", or "auto" for the first of these that works.
        debug: compare every collective over its group before it runs (see `comm.checked`).

    Raises:
        ValueError: the mesh needs another number of ranks than were started, or the transport cannot be had.
    """
    if mesh.size != start.ranks:
        raise ValueError(
            f"the layout needs {mesh.size} ranks (data {mesh.data} x pipeline {mesh.pipeline} x tensor {mesh.tensor}), "
            f"but {start.ranks} were started"
        )
    if mesh.size == 1:
        return solo(device)
    store = dist.PrefixStore(f"attempt-{start.attempt}", _store(start, timeout))
    return _assemble(mesh, start.rank, device, Ledger(), wire(store, start, device, timeout, transport, debug))


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
    def group(name: str, ranks: tuple[int, ...]) -> Group:
        return SoloGroup(name, rank, ledger) if wiring is None else wiring.group(name, ranks, rank, ledger)

    def channel(label: str, ranks: tuple[int, ...]) -> Channel:
        return SoloChannel(label, ranks, 0, ledger) if wiring is None else wiring.channel(label, ranks, rank, ledger)

    line = mesh.group(Axis.PIPELINE, rank)
    data = group(Axis.DATA, mesh.group(Axis.DATA, rank))
    return Groups(
        mesh=mesh,
        rank=rank,
        device=device,
        ledger=ledger,
        world=group("world", tuple(range(mesh.size))),
        data=data,
        shards=data,
        replicas=SoloGroup("replica", rank, ledger),
        pipeline=group(Axis.PIPELINE, line),
        tensor=group(Axis.TENSOR, mesh.group(Axis.TENSOR, rank)),
        activations=channel("activations", line),
        gradients=channel("gradients", line),
        wiring=wiring,
    )
