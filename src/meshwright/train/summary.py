"""The end of a run in numbers: bytes of model states measured on each rank, beside the formula of its ZeRO stage."""

from __future__ import annotations

import torch

from meshwright.comm.group import Group
from meshwright.costs.sheet import sheet
from meshwright.costs.spec import GPTSpec
from meshwright.layout.layout import Layout
from meshwright.layout.zero import StateBytes, model_state_bytes
from meshwright.parallel.precision import Precision
from meshwright.schedule.cut import Cut


def parameters_on_rank(spec: GPTSpec, cut: Cut, stage: int, tensor_size: int) -> int:
    """Parameters (Ψ) of one stage on one tensor rank, by the cost sheet, without padding.

    A tied matrix is counted where it is held: once, also on a stage that uses it twice.
    """
    rows = [sheet(spec)[layer] for layer in cut.layers(stage)]
    table = spec.vocabulary * spec.hidden
    repeated = sum(max(0, len(set(tie.layers) & set(cut.layers(stage))) - 1) for tie in cut.ties) * table
    split = sum(row.split_parameters for row in rows) - repeated
    whole = sum(row.parameters - row.split_parameters for row in rows)
    return whole + -(-split // tensor_size)


def all_ranks(world: Group, own: StateBytes, device: torch.device) -> list[StateBytes]:
    """Every rank's bytes, on every rank, in the order of ranks."""
    table = torch.zeros(world.size, 3, dtype=torch.int64, device=device)
    table[world.index] = torch.tensor([own.parameters, own.gradients, own.optimizer])
    world.all_reduce(table, label="summary")
    return [StateBytes(*row) for row in table.tolist()]


def table(layout: Layout, measured: list[StateBytes], formula: list[StateBytes]) -> str:
    """One row per rank: bytes of each model state, measured, and by the formula in brackets."""
    heading = f"model states per rank, MB, measured (formula of ZeRO stage {int(layout.zero)})"
    columns = ("parameters", "gradients", "optimizer states", "all")
    rows = [f"{'rank':>6} {'data.pipeline.tensor':>22}" + "".join(f"{column:>20}" for column in columns)]
    for rank, (real, theory) in enumerate(zip(measured, formula, strict=True)):
        place = layout.mesh.coordinate(rank)
        numbers = zip(_columns(real), _columns(theory), strict=True)
        rows.append(
            f"{rank:>6} {f'{place.data}.{place.pipeline}.{place.tensor}':>22}"
            + "".join(f"{f'{a / 1e6:.3f} ({b / 1e6:.3f})':>20}" for a, b in numbers)
        )
    shared = any(real.parameters < theory.parameters for real, theory in zip(measured, formula, strict=True))
    note = ["parameters that the ranks of a host share exist once; each rank counts its part"] if shared else []
    return "\n".join([heading, *rows, *note])


def _columns(states: StateBytes) -> tuple[int, int, int, int]:
    return states.parameters, states.gradients, states.optimizer, states.total


def formula(spec: GPTSpec, layout: Layout, cut: Cut, precision: Precision) -> list[StateBytes]:
    """What the ZeRO table says for every rank, with Adam in the run's precision."""
    return [
        model_state_bytes(
            parameters_on_rank(spec, cut, layout.mesh.coordinate(rank).pipeline, layout.tensor),
            layout.data,
            layout.zero,
            precision.adam_bytes,
        )
        for rank in range(layout.ranks)
    ]
