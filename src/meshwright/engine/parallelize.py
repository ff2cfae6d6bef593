"""The library's front door: data parallelism and ZeRO for a module that somebody else has written.

    model = meshwright.parallelize(module, "dp2/zero3", optimizer=partial(AdamW, lr=1e-3), loss=loss)
    result = model.step([batch])          or by hand:    model.backward(loss(model, batch)); model.update()

The module keeps its code; its parameters become views of flat units (`parallel.unit`), which are gathered, reduced and
updated as the layout's ZeRO stage says. Every rank makes the same calls. Tensor and pipeline parallelism need to know
what is inside a module, and are not offered here (see `engine.build`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.connect import Groups, connect, solo
from meshwright.comm.start import Start
from meshwright.engine.installed import Dtypes, Installed
from meshwright.engine.parallel import LossFunction, Parallel
from meshwright.layout.layout import Checkpoints, Layout, Recompute
from meshwright.parallel.blocks import Units, divide
from meshwright.parallel.elementwise import OptimizerFactory
from meshwright.parallel.zero import ShardedOptimizer


def parallelize(
    module: nn.Module,
    layout: Layout | str,
    *,
    optimizer: OptimizerFactory,
    loss: LossFunction | None = None,
    groups: Groups | None = None,
    units: Units = None,
    parameter_groups: Sequence[Mapping[str, Any]] | None = None,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    clip: float | None = None,
) -> Parallel:
    """Train `module` over the data axis of `layout` with its ZeRO stage; the module is changed in place.

    All ranks start from the values of data rank 0.

    Args:
        module: any; on a real device.
        layout: such as "dp4/zero3", or "dp8/zero3/shard4" (HSDP); only the data axis, ZeRO, m, prefetch and offload.
        optimizer: makes an optimizer from parameter groups, as `functools.partial(torch.optim.AdamW, lr=1e-3)` does; it
            must treat every element by itself.
        loss: what `step` and `evaluate` minimise: from the module and a micro-batch to a mean, or a `LossSum`.
        groups: of this rank (`comm.connect`); None: as torchrun or SLURM has started this process, or alone.
        units: what is gathered, reduced and released together (`parallel.blocks`).
        parameter_groups: as torch's optimizers take them: dicts with "params" (parameters of the module) and options;
            parameters in none of them are frozen. None: one group of all.
        dtype: of parameters and buffers while training; None: as they are, also several. 16-bit parameters have float32
            masters.
        reduce_dtype: in which gradients are summed over ranks; those that it cannot hold in the next wider dtype that
            can. None: as they are computed.
        clip: largest norm of the whole gradient.

    Raises:
        ValueError: the layout divides more than the data axis, the optimizer is not elementwise, or the module has
            nothing to train; the message says what works.
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    _require_data_only(layout)
    groups = groups or _groups(layout)
    if groups.mesh != layout.mesh:
        raise ValueError(f"{layout} needs {layout.ranks} ranks on its data axis, but the groups are of {groups.mesh}")
    options, group_of = _optimizer_groups(module, parameter_groups)
    blocks = divide(module, units, group_of)
    if not any(key.trainable for block in blocks for key in block.members):
        raise ValueError(
            f"no parameter of {type(module).__name__} is trained: none requires a gradient and is in a parameter group"
        )
    installed = Installed(module, blocks, layout, groups, Dtypes(dtype, reduce_dtype))
    return Parallel(module, layout, installed, ShardedOptimizer(installed.units, optimizer, options), loss, clip)


def _require_data_only(layout: Layout) -> None:
    if layout.tensor > 1 or layout.pipeline > 1:
        raise ValueError(
            f"{layout}: parallelize divides any module over the data axis, but tp={layout.tensor} and "
            f"pp={layout.pipeline} need to know what is inside; try dp{layout.ranks}/zero{int(layout.zero)}"
        )
    kept = [f"recompute-{layout.recompute}"] if layout.recompute is not Recompute.NONE else []
    kept += [str(layout.checkpoints)] if layout.checkpoints is not Checkpoints.WHOLE else []
    if kept:
        raise ValueError(
            f"{layout}: what is kept for the backward pass is up to the module itself; leave out "
            f"{' and '.join(kept)}, and use torch.utils.checkpoint inside of it"
        )


def _groups(layout: Layout) -> Groups:
    """As this process was started."""
    start = Start.from_environment(os.environ)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", start.local_rank if start else 0)
        torch.cuda.set_device(device)
    if start is None and layout.ranks == 1:
        return solo(device)
    if start is None:
        raise ValueError(
            f"{layout} needs {layout.ranks} ranks, and this process was started alone; start it with "
            f"torchrun --nproc-per-node {layout.ranks}, or hand over the groups of a running rank"
        )
    return connect(layout.mesh, start, device)


def _optimizer_groups(
    module: nn.Module, given: Sequence[Mapping[str, Any]] | None
) -> tuple[Sequence[Mapping[str, Any]], Callable[[nn.Parameter], int]]:
    """The options of each group, and which group a parameter is in. Parameters in no group are frozen from now on."""
    if given is None:
        return ({},), lambda parameter: 0
    number: dict[int, int] = {}
    own = {id(parameter): name for name, parameter in module.named_parameters()}
    for index, group in enumerate(given):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ValueError(f'parameter group {index} is not a dict with "params", a list of parameters')
        members = group["params"]
        for parameter in [members] if isinstance(members, Tensor) else list(members):
            if id(parameter) not in own:
                raise ValueError(f"parameter group {index} has a parameter {tuple(parameter.shape)} of another module")
            if id(parameter) in number:
                name, first = own[id(parameter)], number[id(parameter)]
                raise ValueError(f"{name} is in the parameter groups {first} and {index}; keep one of them")
            number[id(parameter)] = index
    for parameter in module.parameters():
        if id(parameter) not in number:
            parameter.requires_grad_(False)
    options = tuple({key: value for key, value in group.items() if key != "params"} for group in given)
    return options, lambda parameter: number[id(parameter)]
