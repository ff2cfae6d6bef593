"""What each of four ranks on two hosts runs: every collective flat and hierarchically, checked, and the bytes counted.

Started by `test_two_hosts.py` in network namespaces. The first rank of each host prints what its host sent, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.comm.backend import gloo_device
from meshwright.comm.connect import Groups, connect
from meshwright.comm.group import Group, Reduction
from meshwright.comm.hosts import Hosts, host_names, this_host
from meshwright.comm.layered import Ground, layered_group
from meshwright.comm.start import Start
from meshwright.layout.mesh import Mesh

NUMEL = 1 << 18
"""Elements of the whole tensor: 1 MB."""


def all_reduce(group: Group) -> None:
    tensor = torch.full((NUMEL,), 1.0 + group.index)
    group.all_reduce(tensor, label="test")
    assert torch.equal(tensor, torch.full((NUMEL,), group.size * (group.size + 1) / 2))


def all_reduce_maximum(group: Group) -> None:
    tensor = torch.full((NUMEL,), 1.0 + group.index)
    group.all_reduce(tensor, label="test", reduction=Reduction.MAX)
    assert torch.equal(tensor, torch.full((NUMEL,), float(group.size)))


def reduce_scatter(group: Group) -> None:
    whole = torch.arange(float(NUMEL))
    part = torch.empty(NUMEL // group.size)
    group.reduce_scatter(whole.clone(), part, label="test")
    assert torch.equal(part, group.size * whole.view(group.size, -1)[group.index])


def all_gather(group: Group) -> None:
    whole = torch.empty(NUMEL)
    group.all_gather(torch.full((NUMEL // group.size,), float(group.index)), whole, label="test")
    assert torch.equal(whole, torch.arange(float(group.size)).repeat_interleave(NUMEL // group.size))


def broadcast(group: Group) -> None:
    tensor = torch.full((NUMEL,), float(group.index))
    group.broadcast(tensor, 2, label="test")
    assert torch.equal(tensor, torch.full((NUMEL,), 2.0))


COLLECTIVES = (all_reduce, all_reduce_maximum, reduce_scatter, all_gather, broadcast)


def sent(groups: Groups, interface: str, act: Callable[[], None]) -> int:
    """Bytes that this host sends to the other while all ranks do `act`."""
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    groups.world.barrier()
    before = int(counter.read_text())
    groups.world.barrier()  # nobody begins before all have read
    act()
    groups.world.barrier()
    return int(counter.read_text()) - before


def main(interface: str) -> None:
    start = Start.from_environment(os.environ)
    assert start is not None
    groups = connect(Mesh(data=start.ranks), start, torch.device("cpu"), 30.0, "gloo")
    assert groups.wiring is not None
    store = dist.PrefixStore("hosts", groups.wiring.store)
    hosts = Hosts.of(host_names(store, start.rank, start.ranks, this_host(), 30.0))
    assert hosts.layered, hosts
    data = groups.data
    ground = Ground(dist.PrefixStore("layered", groups.wiring.store), 30.0, gloo_device(False, interface))
    layered = layered_group("data", data.ranks, data.index, groups.ledger, hosts, ground)
    bytes_sent = {
        act.__name__: [
            sent(groups, interface, lambda act=act: act(data)),  # type: ignore[misc]
            sent(groups, interface, lambda act=act: act(layered)),  # type: ignore[misc]
        ]
        for act in COLLECTIVES
    }
    if start.local_rank == 0:
        print(json.dumps(bytes_sent))


if __name__ == "__main__":
    main(sys.argv[1])
