"""Everything that is known of a module's parameters, whatever the layout: what checkpoints hold and runs go on from.

Names and shapes are the module's own; nothing of shards, padding or stages is in it, so it fits any number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.engine.installed import Installed
from meshwright.parallel.zero import ShardedOptimizer


@dataclass(frozen=True)
class ParameterState:
    """Everything that is known of one parameter, in its own shape: what a checkpoint holds.

    `value` is in the precision of the optimizer's master; `remembered` are the optimizer's states by its own keys,
    numbers per element or scalars; a frozen parameter has none.
    """

    name: str
    value: Tensor
    remembered: Mapping[str, Tensor]


@torch.no_grad()
def known_states(installed: Installed, optimizer: ShardedOptimizer) -> Iterator[ParameterState]:
    """Of every parameter, frozen ones included; every rank must exhaust it."""
    remembered = {name: known for _, states in optimizer.export() for name, known in states.items()}
    for unit in installed.units:
        whole = unit.collect(unit.master if unit.trainable else unit.owned_value)
        for slot in unit.slots:
            value = whole[slot.start : slot.stop].view(slot.shape)
            yield ParameterState(slot.name, value, remembered.get(slot.name, {}))


@torch.no_grad()
def load_states(installed: Installed, optimizer: ShardedOptimizer, states: Mapping[str, ParameterState]) -> None:
    """Go on from these; every rank must call it, with the same.

    Raises:
        ValueError: as `Parallel.load_states`. Nothing has been changed then.
    """
    slots = {slot.name: slot for unit in installed.units for slot in unit.slots}
    _require_same_names(slots.keys(), states.keys())
    for name, slot in slots.items():
        if tuple(states[name].value.shape) != slot.shape:
            raise ValueError(f"{name} has the shape {slot.shape}, not {tuple(states[name].value.shape)}")
    installed.groups.data.barrier()  # nobody writes what somebody is still reading
    optimizer.restore({name: state.remembered for name, state in states.items()})
    for unit in installed.units:
        for slot in unit.slots:
            unit.load(slot.name, states[slot.name].value)
    installed.groups.data.barrier()  # nobody reads what somebody is still writing
    if installed.hooks is None:
        installed.make_whole()


def _require_same_names(own: Collection[str], given: Collection[str]) -> None:
    missing, unknown = sorted(set(own) - set(given)), sorted(set(given) - set(own))
    if missing or unknown:
        parts = [f"{len(missing)} are missing ({missing[0]} ...)"] if missing else []
        parts += [f"{len(unknown)} are unknown ({unknown[0]} ...)"] if unknown else []
        raise ValueError(f"these are not the parameters of this module: {', '.join(parts)}")
