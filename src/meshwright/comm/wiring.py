"""Which transport carries which group and channel of one rank, decided here and nowhere else.

all ranks of the mesh are CPU processes of one host, and can share memory     shared memory
CPU processes otherwise                                                        gloo
GPUs                                                                           NCCL

A group of CPU processes on several hosts with the same number of ranks on each is hierarchical (`layered.py`). In debug
mode every group compares its calls before it makes them (`checked.py`).
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm.backend import Backend, gloo, gloo_device, nccl
from meshwright.comm.channel import Channel, SoloChannel
from meshwright.comm.checked import CheckedGroup
from meshwright.comm.group import Group, SoloGroup
from meshwright.comm.hosts import Hosts, host_names, this_host
from meshwright.comm.layered import Ground, layered_group
from meshwright.comm.ledger import Ledger
from meshwright.comm.shared.board import Board
from meshwright.comm.shared.channel import SharedChannel
from meshwright.comm.shared.group import SharedGroup
from meshwright.comm.shared.host import Host, UnavailableError, join
from meshwright.comm.shared.progress import Progress
from meshwright.comm.start import Start
from meshwright.comm.torch_channel import TorchChannel
from meshwright.comm.torch_group import TorchGroup

_log = logging.getLogger(__name__)


class Transport(StrEnum):
    """What the user may ask for."""

    AUTO = "auto"
    SHARED = "shared"
    GLOO = "gloo"


@dataclass(frozen=True)
class Wiring:
    """What groups and channels of one rank are made from.

    Args:
        store: of this attempt. Everything made takes a prefix of its own in it.
        device: of the tensors.
        timeout: seconds of every wait.
        hosts: the name of every rank's host.
        host: the ranks that share memory, if all do; and what this rank has under way with them.
        debug: whether groups compare their calls before they make them.
        made: the groups that are made later (among stages, runs of shards, gathers), by name: a second engine on the
            same mesh must not meet the first one's entries in the store.
    """

    store: dist.Store
    device: torch.device
    timeout: float
    hosts: tuple[str, ...]
    host: Host | None
    progress: Progress | None
    debug: bool
    made: dict[str, Group] = field(default_factory=dict)

    def group(self, name: str, ranks: tuple[int, ...], rank: int, ledger: Ledger) -> Group:
        """The group of `ranks`, all of which call this with the same `name`, and for which they do so once."""
        index = ranks.index(rank)
        if len(ranks) == 1:
            return SoloGroup(name, rank, ledger)
        group = self._connected(name, ranks, index, ledger)
        return CheckedGroup(group, self.store, self.device, self.timeout) if self.debug else group

    def _connected(self, name: str, ranks: tuple[int, ...], index: int, ledger: Ledger) -> Group:
        key = f"{name}-{'-'.join(map(str, ranks))}"
        if self.host is not None and self.progress is not None:
            return SharedGroup(name, ranks, index, ledger, Board.make(self.host, key, ranks), self.progress)
        hosts = Hosts.of([self.hosts[rank] for rank in ranks])
        if hosts.layered and self.device.type == "cpu":
            ground = Ground(dist.PrefixStore(key, self.store), self.timeout, self._gloo_device())
            return layered_group(name, ranks, index, ledger, hosts, ground)
        backend = self._backend(key, index, len(ranks))
        return TorchGroup(name, ranks, index, ledger, backend, native=self.device.type == "cuda")

    def channel(self, label: str, ranks: tuple[int, ...], rank: int, ledger: Ledger) -> Channel:
        """The channel `label` among the stages `ranks`, all of which call this, once."""
        index = ranks.index(rank)
        if len(ranks) == 1:
            return SoloChannel(label, ranks, index, ledger)
        if self.host is not None and self.progress is not None:
            return SharedChannel(label, ranks, index, ledger, self.host, self.progress)
        # A stage that waits for a message stands still, so on a GPU messages go before everything else.
        backend = self._backend(f"{label}-{ranks[0]}", index, len(ranks), urgent=True)
        return TorchChannel(label, ranks, index, ledger, backend)

    def _backend(self, name: str, index: int, size: int, urgent: bool = False) -> Backend:
        """A gloo or NCCL backend for `size` ranks that all call this with the same `name`."""
        store = dist.PrefixStore(name, self.store)
        if self.device.type == "cuda":
            return nccl(store, index, size, self.timeout, urgent)
        return gloo(store, index, size, self._gloo_device(), self.timeout)

    def _gloo_device(self) -> Any:
        return gloo_device(len(set(self.hosts)) == 1, os.environ.get("GLOO_SOCKET_IFNAME", ""))


def wire(
    store: dist.Store, start: Start, device: torch.device, timeout: float, transport: str, debug: bool = False
) -> Wiring:
    """Find out what can carry this run; all ranks come to the same conclusion.

    Raises:
        ValueError: `transport` is none, or the ranks cannot share memory though it says so.
    """
    wanted = _transport(transport)
    local = start.local_ranks == start.ranks
    reason = ""
    host = None
    if device.type != "cpu":
        reason = f"the tensors are on a {device.type} device"
    elif not local:
        reason = f"of {start.ranks} ranks, {start.local_ranks} are on this host"
    elif wanted is not Transport.GLOO:
        try:
            host = join(dist.PrefixStore("shared-memory", store), start.rank, start.ranks, timeout)
        except UnavailableError as error:
            reason = str(error)
            if start.rank == 0 and wanted is Transport.AUTO:
                _log.warning("the ranks cannot share memory, so they use gloo: %s", reason)
    if wanted is Transport.SHARED and host is None:
        raise ValueError(f'transport = "shared": the ranks cannot share memory: {reason}; "auto" takes what there is')
    hosts = ("",) * start.ranks
    if not local:
        # Plain gloo: every rank counts as alone on its host, so that no group is hierarchical.
        own = f"rank {start.rank}" if wanted is Transport.GLOO else this_host()
        hosts = host_names(dist.PrefixStore("hosts", store), start.rank, start.ranks, own, timeout)
    return Wiring(store, device, timeout, hosts, host, Progress(host) if host is not None else None, debug)


def _transport(name: str) -> Transport:
    try:
        return Transport(name)
    except ValueError:
        raise ValueError(f'there is no transport "{name}"; there are {", ".join(Transport)}') from None
