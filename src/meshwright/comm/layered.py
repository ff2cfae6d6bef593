"""Makes the parts of a hierarchical group: shared memory within a host where it can be had, and gloo between hosts.

Each host finds out for itself whether its ranks can share memory; the other hosts need not know. The group's parts
share nothing with the other groups of the process: they are used by a thread of their own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from meshwright.comm.backend import gloo, gloo_device
from meshwright.comm.group import Group, SoloGroup
from meshwright.comm.hierarchical import HierarchicalGroup
from meshwright.comm.hosts import Hosts
from meshwright.comm.ledger import Ledger
from meshwright.comm.shared.board import Board
from meshwright.comm.shared.group import SharedGroup
from meshwright.comm.shared.host import UnavailableError, join
from meshwright.comm.shared.progress import Progress
from meshwright.comm.torch_group import TorchGroup

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ground:
    """What the parts of one group stand on.

    Args:
        store: a part of the store for this group alone.
        timeout: seconds of every wait.
        between: gloo's device towards the other hosts.
        shared: whether to use shared memory within a host.
    """

    store: dist.Store
    timeout: float
    between: Any
    shared: bool = True


def layered_group(
    axis: str, ranks: tuple[int, ...], index: int, ledger: Ledger, hosts: Hosts, ground: Ground
) -> HierarchicalGroup:
    """The group of `ranks` over `hosts`, for its member `index`; every member must call this.

    Raises ValueError if the hosts have different numbers of ranks.
    """
    if hosts.obstacle:
        raise ValueError(f"{axis} group {ranks}: {hosts.obstacle}")
    place = hosts.place(index)
    row = tuple(ranks[member] for member in hosts.inner(index))
    column = tuple(ranks[member] for member in hosts.outer(index))
    within = dist.PrefixStore(f"host-{place.host}", ground.store)
    inner = _shared(f"{axis} within a host", row, place.place, within, ground) if ground.shared else None
    if inner is None:
        inner = _gloo(f"{axis} within a host", row, place.place, within, ground.timeout, gloo_device(True, ""))
    across = dist.PrefixStore(f"place-{place.place}", ground.store)
    outer = _gloo(f"{axis} between hosts", column, place.host, across, ground.timeout, ground.between)
    return HierarchicalGroup(axis, ranks, ledger, hosts, inner, outer)


def _shared(axis: str, ranks: tuple[int, ...], index: int, store: dist.Store, ground: Ground) -> Group | None:
    """The ranks of this host over memory of their own; None, on all of them alike, if they cannot share any."""
    if len(ranks) == 1:
        return SoloGroup(axis, ranks[0], Ledger())
    try:
        host = join(dist.PrefixStore("shared-memory", store), index, len(ranks), ground.timeout)
    except UnavailableError as error:
        if index == 0:
            _log.warning("ranks %s cannot share memory, so they use gloo: %s", ranks, error)
        return None
    board = Board.make(host, "board", tuple(range(len(ranks))))
    return SharedGroup(axis, ranks, index, Ledger(), board, Progress(host))


def _gloo(axis: str, ranks: tuple[int, ...], index: int, store: dist.Store, timeout: float, device: Any) -> Group:
    if len(ranks) == 1:
        return SoloGroup(axis, ranks[0], Ledger())
    backend = gloo(dist.PrefixStore("gloo", store), index, len(ranks), device, timeout)
    return TorchGroup(axis, ranks, index, Ledger(), backend, native=False)
