"""What all ZeRO units of one stage have in common on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.comm.connect import Groups
from meshwright.comm.group import Group
from meshwright.layout.layout import Layout
from meshwright.layout.zero import Sharding, row
from meshwright.parallel.precision import Precision


@dataclass(frozen=True)
class Setting:
    """This rank's groups, the row of the ZeRO table, the dtypes, and where things lie.

    Args:
        shards: the ranks that divide model states.
        gathers: the same ranks, to gather parameters; another group where that is done in another order.
        replicas: the ranks that hold the same part of them (HSDP; else this one alone).
        tensor: the ranks that divide matrices.
        sharding: which states are divided.
        precision: dtypes.
        device: of parameters and gradients.
        offload: whether the optimizer's states are on the host (ZeRO-Offload).
    """

    shards: Group
    gathers: Group
    replicas: Group
    tensor: Group
    sharding: Sharding
    precision: Precision
    device: torch.device
    offload: bool = False

    @classmethod
    def of(cls, layout: Layout, groups: Groups, precision: Precision, apart: bool = False) -> Setting:
        """What `layout` asks for. Where nothing is divided, gradients are summed over all data ranks at once.

        `apart`: gathers have a group of their own, so that they need not keep in step with reductions.
        """
        groups = groups.sharded(layout.shards)
        return cls(
            shards=groups.shards,
            gathers=groups.gathers() if apart else groups.shards,
            replicas=groups.replicas,
            tensor=groups.tensor,
            sharding=row(layout.effective_zero),
            precision=precision,
            device=groups.device,
            offload=layout.offload,
        )

    @property
    def shared(self) -> bool:
        """Whether whole values exist once for all data ranks."""
        return self.sharding.optimizer and self.shards.shares_memory

    @property
    def separate(self) -> bool:
        """Whether the optimizer updates a copy of the values."""
        return self.precision.mixed or self.offload
