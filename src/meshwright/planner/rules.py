"""The only legality rule: what is wrong with a layout for a model, a batch and a number of ranks, or costly.

Each problem carries its numbers and the nearest thing that works. Everything else composes: a combination is never
forbidden for being slow, only warned about with its cost. Nothing is run and nothing is raised here; the caller
decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from meshwright.costs.spec import GPTSpec
from meshwright.costs.traffic import of_layout
from meshwright.layout.layout import Checkpoints, Layout, Recompute
from meshwright.layout.nearest import nearest_divisors, one_of
from meshwright.layout.zero import ZeroStage, row
from meshwright.schedule.catalog import bubble


@dataclass(frozen=True)
class Problem:
    """What is wrong or costly, with the numbers, and the nearest thing that works."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


def problems(layout: Layout, spec: GPTSpec, batch: int, ranks: int | None = None) -> tuple[Problem, ...]:
    """Everything that forbids `layout` for `spec` with `batch` samples per step on `ranks` ranks (None: any number).

    Empty when it is legal.
    """
    return (
        *_tensor(layout, spec),
        *_pipeline(layout, spec),
        *_checkpoints(layout),
        *_batch(batch),
        *_ranks(layout, ranks),
    )


def warnings(layout: Layout, spec: GPTSpec, batch: int) -> tuple[Problem, ...]:
    """What is legal and costs something, with the cost."""
    return (
        *_short_pipeline(layout),
        *_uneven(layout, batch),
        *_idle_zero(layout),
        *_idle_parts(layout),
        *_gathers(layout),
        *_offload(layout),
    )


def _tensor(layout: Layout, spec: GPTSpec) -> Iterator[Problem]:
    if spec.heads % layout.tensor:
        choice = one_of(nearest_divisors(spec.heads, layout.tensor))
        yield Problem(f"tp={layout.tensor} does not divide {spec.heads} heads", f"try tp={choice}")


def _pipeline(layout: Layout, spec: GPTSpec) -> Iterator[Problem]:
    layers = spec.layers + 2
    if layout.pipeline > layers:
        yield Problem(
            f"pp={layout.pipeline} stages are more than {layers} layers"
            f" ({spec.layers} blocks, the embedding and the head), and no stage may be empty",
            f"try pp={layers} or fewer",
        )


def _checkpoints(layout: Layout) -> Iterator[Problem]:
    if layout.checkpoints is not Checkpoints.WHOLE and layout.recompute is Recompute.NONE:
        yield Problem(
            f"{layout.checkpoints} says where the inputs for recomputation are kept, but nothing is recomputed",
            f"add recompute-full, or leave out {layout.checkpoints}",
        )


def _batch(batch: int) -> Iterator[Problem]:
    if batch < 1:
        yield Problem(f"a batch of {batch} samples has nothing to train on", "try batch=1 or more")


def _ranks(layout: Layout, ranks: int | None) -> Iterator[Problem]:
    if ranks is None or layout.ranks == ranks:
        return
    inner = layout.tensor * layout.pipeline
    if ranks % inner == 0 and ranks:
        remedy = f"try dp={ranks // inner}, or start {layout.ranks} ranks"
    else:
        remedy = f"start {layout.ranks} ranks, or try a tp and a pp whose product divides {ranks} instead of {inner}"
    yield Problem(
        f"dp={layout.data} x tp={layout.tensor} x pp={layout.pipeline} = {layout.ranks} ranks, but there are {ranks}",
        remedy,
    )


def _short_pipeline(layout: Layout) -> Iterator[Problem]:
    m, p = layout.micro_batches, layout.pipeline
    if m < p:
        yield Problem(
            f"m={m} micro-batches do not fill pp={p} stages: {_percent(bubble(p, m))} of the time is bubble",
            f"try m={4 * p}, where it is {_percent(bubble(p, 4 * p))}",
        )


def _uneven(layout: Layout, batch: int) -> Iterator[Problem]:
    parts = layout.data * layout.micro_batches
    if batch < 1 or batch % parts == 0:
        return
    equation = f"batch={batch} over dp={layout.data} x m={layout.micro_batches} = {parts} micro-batches"
    if batch < parts:
        yield Problem(f"{equation} leaves {parts - batch} of them empty", f"try batch={parts}")
        return
    small, large = batch // parts, batch % parts
    yield Problem(
        f"{equation} is uneven: {large} of {small + 1} samples and {parts - large} of {small}",
        f"try batch={one_of((batch - large, batch - large + parts))}",
    )


def _idle_zero(layout: Layout) -> Iterator[Problem]:
    if row(layout.zero).optimizer and layout.data == 1:
        yield Problem(
            f"zero={int(layout.zero)} has nothing to divide over: dp=1",
            "try zero=0, or dp=2 and more",
        )


def _idle_parts(layout: Layout) -> Iterator[Problem]:
    """Parts of a layout that its ZeRO stage makes no use of."""
    zero = int(layout.zero)
    if layout.shard and not row(layout.zero).optimizer:
        yield Problem(
            f"shard={layout.shard} has nothing to divide: zero={zero} divides no states", "try zero=1 or more"
        )
    elif layout.shard == 1 and layout.data > 1:
        yield Problem(
            f"shard=1 undoes zero={zero}: over one rank nothing is divided", "try zero=0, or shard=2 and more"
        )
    if layout.prefetch > 1 and not row(layout.zero).parameters:
        yield Problem(
            f"prefetch={layout.prefetch} has nothing to gather ahead: zero={zero} holds the parameters whole",
            "try zero=3, or leave it out",
        )


def _gathers(layout: Layout) -> Iterator[Problem]:
    m = layout.micro_batches
    if not row(layout.effective_zero).parameters or m == 1:
        return
    here, two, one = (float(of_layout(1, replace(layout, zero=ZeroStage(stage))).total) for stage in (3, 2, 1))
    yield Problem(
        f"zero=3 gathers every parameter 2 x m = {2 * m} times a step: a rank sends {here:g} elements per parameter",
        f"zero=2 sends {two:g}, zero=1 {one:g}; fewer micro-batches cost less",
    )


def _offload(layout: Layout) -> Iterator[Problem]:
    if layout.offload and not row(layout.effective_zero).optimizer and layout.data > 1:
        yield Problem(
            f"offload without divided states: each of dp={layout.data} ranks moves every gradient to its host and every"
            " parameter back, and holds all optimizer states there",
            f"zero=1 or more moves and holds 1/{layout.data} of it",
        )


def _percent(part: Fraction) -> str:
    return f"{float(part):.1%}"
