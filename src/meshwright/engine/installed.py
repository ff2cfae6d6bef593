"""What takes the place of a module's parameters: flat units in which they lie, and the hooks that look after them.

Once they are installed, the module computes as before; what ZeRO adds happens around the calls of its blocks. A unit
holds the parameters of a block that have one dtype and are trained or frozen alike, so several dtypes, frozen
parameters and 32-bit adapters in a 16-bit model need nothing special.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from meshwright.comm.connect import Groups
from meshwright.engine.gathering import GatheredBlock, Gathering
from meshwright.engine.hooks import Hooks
from meshwright.engine.reducing import Reducing
from meshwright.layout.layout import Layout
from meshwright.parallel.blocks import Block, Key
from meshwright.parallel.flat import padded_numel
from meshwright.parallel.parameter import DescribedParameter
from meshwright.parallel.pool import GradientPool
from meshwright.parallel.precision import Precision
from meshwright.parallel.setting import Setting
from meshwright.parallel.unit import State, Unit


@dataclass(frozen=True)
class Dtypes:
    """What the user asked for; None: as it comes."""

    compute: torch.dtype | None
    reduce: torch.dtype | None

    def precision(self, own: torch.dtype) -> Precision:
        """Of a unit whose parameters came in dtype `own`."""
        compute = self.compute if self.compute is not None and own.is_floating_point else own
        if self.reduce is None or not own.is_floating_point:
            return Precision.of(compute)
        return Precision.of(compute, torch.promote_types(compute, self.reduce))

    def require_use(self, trained: Collection[torch.dtype]) -> None:
        """Raise ValueError if gradients of no trained dtype can be reduced as the user asked."""
        computes = [self.precision(own).compute for own in trained]
        if self.reduce is not None and all(
            torch.promote_types(compute, self.reduce) != self.reduce for compute in computes
        ):
            Precision.of(computes[0], self.reduce)  # which says why


class Installed:
    """The units of a module on one rank, in the order of their blocks; `module` reads its parameters from them."""

    def __init__(
        self, module: nn.Module, blocks: Sequence[Block], layout: Layout, groups: Groups, dtypes: Dtypes
    ) -> None:
        dtypes.require_use([key.dtype for block in blocks for key in block.members if key.trainable])
        self.groups = groups
        self._module = module
        self._dtypes = dtypes
        self.setting = Setting.of(layout, groups, dtypes.precision(torch.float32), apart=True)
        sizes = (
            padded_numel(members, self.setting.shards.size, 1)
            for block in blocks
            for key, members in block.members.items()
            if key.trainable
        )
        self.pool = GradientPool(self.setting.shards, max(sizes), groups.device)
        self._blocks = tuple(
            GatheredBlock(block.name, tuple(self._unit(block, key, members) for key, members in block.members.items()))
            for block in blocks
        )
        self.units = tuple(unit for block in self._blocks for unit in block.units)
        self._move_buffers()
        self.reducing = Reducing([unit for unit in self.units if unit.trainable])
        self.hooks: Hooks | None = None
        if self.setting.sharding.parameters and not self.setting.shared:
            for block in self._blocks:
                block.release()
            gathering = Gathering(self._blocks, self.setting.gathers, layout.prefetch, groups.device)
            self.hooks = Hooks(module, blocks, gathering)
        else:
            # Where ranks share memory the whole parameters exist once in any case, and nobody releases them.
            self.make_whole()

    def _unit(self, block: Block, key: Key, members: Sequence[DescribedParameter]) -> Unit:
        values = {one.name: one.parameter.detach() for one in members}
        name = block.name if len(block.members) == 1 else f"{block.name} ({key})"
        setting = replace(self.setting, precision=self._dtypes.precision(key.dtype))
        unit = Unit(name, members, setting, self.pool, key.trainable)
        for parameter, value in values.items():
            unit.load(parameter, self._of_first_rank(value))
        return unit

    def _of_first_rank(self, value: Tensor) -> Tensor:
        """The value that data rank 0 has."""
        value = value.to(self.groups.device).contiguous()
        if self.groups.data.size > 1:
            value = value.clone()
            self.groups.data.broadcast(value.view(-1), 0, label="initial values")
        return value

    def _move_buffers(self) -> None:
        dtype = self._dtypes.compute
        for owner in self._module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    moved = buffer.to(dtype) if dtype is not None and buffer.is_floating_point() else buffer
                    owner._buffers[name] = self._of_first_rank(moved)

    def require_frozen(self) -> None:
        """Raise ValueError if a parameter wants a gradient for which no room was made."""
        for unit in self.units:
            for slot, parameter in () if unit.trainable else unit.parameters():
                if parameter.requires_grad:
                    raise ValueError(
                        f"{slot.name} was frozen when the module was divided and cannot be trained now; let it require "
                        "a gradient before `parallelize`, and freeze it afterwards"
                    )

    def make_whole(self) -> None:
        """Gather all units anew, where they stay whole."""
        for unit in self.units:
            if unit.setting.sharding.parameters and unit.state is State.WHOLE:
                unit.release()
            if unit.state is State.SHARDED:
                unit.start_gather()
        for unit in self.units:
            unit.whole()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All parameters can be read within; every rank must enter it."""
        if self.hooks is None:
            yield
            return
        for block in self._blocks:
            block.start()
            block.settle()
        try:
            yield
        finally:
            for block in self._blocks:
                block.release()
