"""Hierarchical groups on the ranks of a pool, some of which are taken to be on other hosts than the rest."""

from __future__ import annotations

import torch.distributed as dist

from meshwright.comm.backend import gloo_device
from meshwright.comm.connect import Groups
from meshwright.comm.hierarchical import HierarchicalGroup
from meshwright.comm.hosts import Hosts
from meshwright.comm.layered import Ground, layered_group


def hierarchical(groups: Groups, names: str, within: str = "gloo") -> HierarchicalGroup:
    """The data group as if its member i were on the host `names[i]`; made once for all tests, counting from 0.

    `within` a host the ranks use "gloo" or "shared" memory.
    """
    assert groups.wiring is not None
    made, data = groups.wiring.made, groups.data
    key = f"{within}-{names}"
    if key not in made:
        store = dist.PrefixStore(f"{key}-{data.ranks[0]}", groups.wiring.store)
        ground = Ground(store, groups.wiring.timeout, gloo_device(True, ""), within == "shared")
        made[key] = layered_group("data", data.ranks, data.index, groups.ledger, Hosts.of(names), ground)
    group = made[key]
    assert isinstance(group, HierarchicalGroup)
    group.inner.ledger.clear()
    group.outer.ledger.clear()
    return group
