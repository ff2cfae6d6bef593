"""Which ranks of a group share a host: what a hierarchy of collectives is built on.

A value made from one name per rank, and how the ranks learn each other's. What the hierarchy then does is
`hierarchical.py`; which groups get one is decided where groups are made.

    names a a a b b b      host 0: members 0 1 2, host 1: members 3 4 5
                           member 4 stands in place 1 of host 1: inner group (3, 4, 5), outer group (1, 4)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from meshwright.comm.group import CommunicationError


@dataclass(frozen=True)
class Place:
    """Where a member of a group stands: the number of its host, and its place among the members there."""

    host: int
    place: int


@dataclass(frozen=True)
class Hosts:
    """The members of a group by host: `members[h]` are the indices in the group of those on host h, ascending.

    Hosts stand in the order of their first member.
    """

    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> Hosts:
        """The hosts of a group whose member i is on the host `names[i]`."""
        found: dict[str, list[int]] = {}
        for index, name in enumerate(names):
            found.setdefault(name, []).append(index)
        return cls(tuple(tuple(members) for members in found.values()))

    @property
    def obstacle(self) -> str:
        """Why there can be no hierarchy over these hosts; empty if there can."""
        counts = [len(members) for members in self.members]
        if len(set(counts)) == 1:
            return ""
        even = sum(counts) // len(counts)
        remedy = f"{even} on each" if even * len(counts) == sum(counts) else f"a multiple of {len(counts)} ranks"
        return f"the hosts have {', '.join(map(str, counts))} ranks; a hierarchy needs equally many, such as {remedy}"

    @property
    def layered(self) -> bool:
        """Whether a hierarchy is of use: several hosts with the same number of ranks, and that several too."""
        return not self.obstacle and len(self.members) > 1 and len(self.members[0]) > 1

    def place(self, index: int) -> Place:
        """Where member `index` of the group stands."""
        host = next(host for host, members in enumerate(self.members) if index in members)
        return Place(host, self.members[host].index(index))

    def inner(self, index: int) -> tuple[int, ...]:
        """The members on the host of member `index`, itself among them."""
        return self.members[self.place(index).host]

    def outer(self, index: int) -> tuple[int, ...]:
        """The members that have the same place on each host as member `index`. There must be no obstacle."""
        return tuple(members[self.place(index).place] for members in self.members)


def this_host() -> str:
    """A name that two processes share when they run on the same machine and in the same network namespace of it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else os.uname().nodename
    namespace = Path("/proc/self/ns/net")
    return f"{machine}/{os.readlink(namespace)}" if namespace.exists() else machine


def host_names(store: dist.Store, rank: int, ranks: int, own: str, timeout: float) -> tuple[str, ...]:
    """The names of the hosts of all `ranks`; every rank must call this, once for a part of a store, with its own.

    Raises CommunicationError if a rank did not within `timeout` seconds.
    """
    store.set(f"host/{rank}", own)
    keys = [f"host/{each}" for each in range(ranks)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        absent = [each for each, key in enumerate(keys) if not store.check([key])]
        raise CommunicationError(f"rank {rank}: ranks {absent} did not name their host in {timeout:g} s") from error
    return tuple(store.get(key).decode() for key in keys)
