"""Builds the engine of one rank for a GPT: cut the layers, build this stage's on the meta device, fill its units.

A parameter's life begins here: described by its layer, given its initial value from the seed and its global name, cut
for the tensor axis, and written into the part of the flat unit that this rank holds. The whole model never exists on
one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

import torch
from torch import nn

from meshwright.comm.connect import Groups
from meshwright.comm.group import Group
from meshwright.costs.spec import GPTSpec
from meshwright.engine.engine import Engine
from meshwright.engine.stage import Stage
from meshwright.layout.layout import Checkpoints, Layout
from meshwright.model.gpt import TIED, build_layer, parameters_of
from meshwright.model.split import cut_layers
from meshwright.parallel.elementwise import OptimizerFactory
from meshwright.parallel.flat import padded_numel
from meshwright.parallel.parameter import DECAY_GROUPS, DescribedParameter, cut, initial_value
from meshwright.parallel.pool import GradientPool
from meshwright.parallel.precision import Precision
from meshwright.parallel.residual import Here, Host, Split, Store
from meshwright.parallel.setting import Setting
from meshwright.parallel.unit import Unit
from meshwright.parallel.zero import ShardedOptimizer
from meshwright.schedule.cut import Cut


def build(
    spec: GPTSpec,
    layout: Layout,
    groups: Groups,
    optimizer: OptimizerFactory,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype | None = None,
    clip: float | None = None,
) -> Engine:
    """The engine of the rank that `groups` belongs to; the weights depend on `seed` and not on the layout.

    In a 16-bit `dtype` the optimizer updates float32 masters, and a float16 loss is scaled. Gradients are summed over
    ranks in `reduce_dtype`, or as they are computed.
    """
    stages = cut_layers(spec, layout.pipeline)
    meta = torch.device("meta")
    layers = {
        index: build_layer(spec, index, groups.tensor, meta, dtype) for index in stages.layers(groups.pipeline.index)
    }
    setting = Setting.of(layout, groups, Precision.of(dtype, reduce_dtype))
    by_unit = _by_unit(spec, layers, stages)
    largest = max(padded_numel(parameters, setting.shards.size, groups.tensor.size) for parameters in by_unit.values())
    pool = GradientPool(setting.shards, largest, groups.device)
    units = {name: Unit(name, parameters, setting, pool) for name, parameters in by_unit.items()}
    for unit in units.values():
        _fill(unit, seed)
    stage = Stage(layers, units, stages, spec.hidden, dtype, checkpoint_store(layout.checkpoints, groups.tensor))
    return Engine(layout, stage, groups, ShardedOptimizer(list(units.values()), optimizer, DECAY_GROUPS), clip)


def checkpoint_store(place: Checkpoints, tensor: Group) -> Store:
    """Where a layout's recompute inputs are kept; over one tensor rank nothing is split."""
    match place:
        case Checkpoints.WHOLE:
            return Here()
        case Checkpoints.SPLIT:
            return Split(tensor, Here()) if tensor.size > 1 else Here()
        case Checkpoints.HOST:
            return Split(tensor, Host()) if tensor.size > 1 else Host()
        case _:
            assert_never(place)


def _by_unit(spec: GPTSpec, layers: Mapping[int, nn.Module], stages: Cut) -> Mapping[str, Sequence[DescribedParameter]]:
    """Which parameters make up each unit: a layer's own, and each tied one on its own."""
    tied = dict.fromkeys([TIED], stages.ties[0].name) if stages.ties else {}
    members: dict[str, list[DescribedParameter]] = {}
    for index, layer in layers.items():
        for parameter in parameters_of(spec, index, layer):
            members.setdefault(tied.get(parameter.name, str(index)), []).append(parameter)
    return members


def _fill(unit: Unit, seed: int) -> None:
    """Give every parameter its initial value, and leave the unit as it stands between steps."""
    tensor = unit.setting.tensor
    for slot in unit.slots:
        unit.load(slot.name, cut(initial_value(slot.spec, slot.name, seed), slot.spec, tensor.index, tensor.size))
    unit.rest()
