"""The end of a run in numbers: the memory of every rank as it was measured, beside the formulas of ZeRO and ZeRO-R."""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

import torch

from meshwright.comm.group import Group
from meshwright.costs.sheet import sheet
from meshwright.costs.spec import GPTSpec
from meshwright.engine.meter import Footprint
from meshwright.layout.layout import Checkpoints, Layout, Recompute
from meshwright.layout.zero import StateBytes, model_state_bytes, row
from meshwright.parallel.precision import Precision
from meshwright.parallel.reductions import UNDER_WAY
from meshwright.schedule.catalog import build as build_schedule
from meshwright.schedule.cut import Cut

MEMORY = "memory.json"


@dataclass(frozen=True)
class Work:
    """What a run's memory follows from; `batch` is the samples of one step over all ranks."""

    spec: GPTSpec
    layout: Layout
    cut: Cut
    precision: Precision
    batch: int


# --- the formulas -----------------------------------------------------------------------------------------------------


def parameters_on_rank(spec: GPTSpec, cut: Cut, stage: int, tensor_size: int) -> int:
    """Parameters (Ψ) of one stage on one tensor rank, by the cost sheet, without padding.

    A tied matrix is counted where it is held: once, also on a stage that uses it twice.
    """
    return sum(unit_parameters(spec, cut, stage, tensor_size))


def unit_parameters(spec: GPTSpec, cut: Cut, stage: int, tensor_size: int) -> list[int]:
    """Parameters of each unit of one stage on one tensor rank, by the cost sheet, without padding; the layers first."""
    table = spec.vocabulary * spec.hidden
    tied = [tie for tie in cut.ties if set(tie.layers) & set(cut.layers(stage))]
    found = []
    for layer in cut.layers(stage):
        whole = sheet(spec)[layer].parameters - sheet(spec)[layer].split_parameters
        split = sheet(spec)[layer].split_parameters - table * sum(layer in tie.layers for tie in tied)
        found.append(whole + -(-split // tensor_size))
    return found + [-(-table // tensor_size)] * len(tied)


def formula(spec: GPTSpec, layout: Layout, cut: Cut, precision: Precision) -> list[StateBytes]:
    """What the ZeRO table says for every rank, with Adam in the run's precision."""
    per_parameter = precision.adam_bytes
    if row(layout.effective_zero).gradients:  # what persists of them is the sum
        per_parameter = replace(per_parameter, gradients=precision.reduce.itemsize)
    if layout.offload and not precision.mixed:  # the host steps a copy of the weights
        per_parameter = replace(per_parameter, optimizer=per_parameter.optimizer + precision.master.itemsize)
    return [
        model_state_bytes(
            parameters_on_rank(spec, cut, layout.mesh.coordinate(rank).pipeline, layout.tensor),
            layout.shards,
            layout.effective_zero,
            per_parameter,
        )
        for rank in range(layout.ranks)
    ]


def buffer_formula(work: Work) -> list[int]:
    """The most bytes that steps use again and again on every rank: whole gradients under way, and checkpoints.

    Neither grows with the number of units; checkpoints grow with the layers, for that is what recompute keeps.
    """
    return [_gradient_buffers(work, rank) + _checkpoints(work, rank) for rank in range(work.layout.ranks)]


def _gradient_buffers(work: Work, rank: int) -> int:
    """C_B (ZeRO, section 6.2): as many buffers of the largest unit as gradients are under way at a time."""
    if not row(work.layout.effective_zero).gradients:
        return 0
    stage = work.layout.mesh.coordinate(rank).pipeline
    units = unit_parameters(work.spec, work.cut, stage, work.layout.tensor)
    at_once = max(len(work.cut.units(layer)) for layer in work.cut.layers(stage))  # its own, and a tied one
    dtypes = {work.precision.compute, work.precision.reduce}
    return min(UNDER_WAY + at_once, len(units)) * max(units) * sum(dtype.itemsize for dtype in dtypes)


def _checkpoints(work: Work, rank: int) -> int:
    """P_a (ZeRO, section 6.1): the inputs, (b, s, h), of the layers of all micro-batches in flight, or 1/t of each."""
    layout, spec, stage = work.layout, work.spec, work.layout.mesh.coordinate(rank).pipeline
    if layout.recompute is not Recompute.FULL:
        return 0
    in_flight = build_schedule(layout.schedule, layout.pipeline, layout.micro_batches).in_flight(stage)
    layers = sum(layer > 0 for layer in work.cut.layers(stage))  # what the first reads are tokens
    samples = -(-work.batch // (layout.micro_batches * layout.data))
    shared = layout.tensor if layout.checkpoints is not Checkpoints.WHOLE else 1
    return in_flight * layers * -(-samples * spec.sequence * spec.hidden // shared) * work.precision.compute.itemsize


# --- what was measured ------------------------------------------------------------------------------------------------


def all_ranks(world: Group, own: Footprint, device: torch.device) -> list[Footprint]:
    """Every rank's memory, on every rank, in the order of ranks."""
    rows = torch.zeros(world.size, len(astuple(own)), dtype=torch.int64, device=device)
    rows[world.index] = torch.tensor(astuple(own))
    world.all_reduce(rows, label="summary")
    return [Footprint(*row) for row in rows.tolist()]


def write(measured: list[Footprint], run: Path) -> None:
    """The bytes of all ranks as JSON below `run`."""
    rows = [{"rank": rank, **asdict(own), "peak": own.peak} for rank, own in enumerate(measured)]
    (run / MEMORY).write_text(json.dumps(rows, indent=1) + "\n")


def table(work: Work, measured: list[Footprint], with_step: bool) -> str:
    """One row per rank: bytes measured, and by the formula in brackets where there is one.

    `with_step` says that a step was measured, and not only what lives between steps.
    """
    layout = work.layout
    theory = formula(work.spec, layout, work.cut, work.precision)
    optimizer = "optimizer on host" if layout.offload else "optimizer states"
    columns = ["parameters", "gradients", optimizer, "buffers"] + ["activations", "peak"] * with_step
    lines = [
        f"memory per rank, MB, measured (model states: formula of ZeRO stage {int(layout.zero)}; buffers: at most)",
        f"{'rank':>6} {'data.pipeline.tensor':>22}" + "".join(f"{column:>20}" for column in columns),
    ]
    for rank, (real, states, buffers) in enumerate(zip(measured, theory, buffer_formula(work), strict=True)):
        place = layout.mesh.coordinate(rank)
        cells = (
            f"{_mb(real.parameters)} ({_mb(states.parameters)})",
            f"{_mb(real.gradients)} ({_mb(states.gradients)})",
            f"{_mb(real.optimizer + real.host)} ({_mb(states.optimizer)})",
            f"{_mb(real.buffers)} ({_mb(buffers)})",
            *([_mb(real.activations), _mb(real.peak)] if with_step else []),
        )
        where = f"{place.data}.{place.pipeline}.{place.tensor}"
        lines.append(f"{rank:>6} {where:>22}" + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join([*lines, *_notes(layout, measured, theory)])


def _notes(layout: Layout, measured: list[Footprint], theory: list[StateBytes]) -> list[str]:
    notes = []
    if any(real.parameters < states.parameters for real, states in zip(measured, theory, strict=True)):
        notes.append("parameters that the ranks of a host share exist once; each rank counts its part")
    if layout.offload:
        notes.append("optimizer states are in the host's memory and do not count in the peak")
    return notes


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3f}"
