"""`meshwright show LAYOUT`: the mesh, the schedule with its bubble, and the program of one rank, as text.

Pure text from pure values, at most `WIDTH` columns, without colours. The schedule is drawn from the simulator, with a
forward as the unit of time and a backward twice as long; nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import assert_never

from meshwright.costs.balance import balance
from meshwright.costs.sheet import sheet
from meshwright.costs.spec import GPTSpec
from meshwright.layout.layout import Layout, ScheduleName
from meshwright.layout.zero import row
from meshwright.planner.simulate import simulate
from meshwright.report.grid import excerpt, mesh_picture, time_picture
from meshwright.report.listing import program_picture
from meshwright.schedule.catalog import bubble, build
from meshwright.schedule.cut import Cut, Tie
from meshwright.schedule.op import Kind, Op
from meshwright.schedule.passes import lower
from meshwright.schedule.schedule import Schedule
from meshwright.schedule.timeline import Timeline

WIDTH = 110
"""Columns of a picture."""


def show(layout: Layout, rank: int = 0, layers_per_stage: int = 1, spec: GPTSpec | None = None) -> str:
    """The picture of a layout, with the program of global rank `rank`.

    The program has the layers of `spec` in a balanced cut, or without a spec `layers_per_stage` layers on each stage.
    Raises ValueError for a rank that is not on the mesh, or more stages than the spec has layers.
    """
    here = layout.mesh.coordinate(rank)
    schedule = build(layout.schedule, layout.pipeline, layout.micro_batches)
    timeline = simulate(schedule, _forwards)
    cut = _cut(layout, layers_per_stage, spec)
    program = lower(schedule, here.pipeline, cut, layout)
    place = f"dp {here.data}, pp {here.pipeline}, tp {here.tensor}"
    layers = cut.layers(here.pipeline)
    held = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
    return "\n".join(
        (
            f"{layout}   {layout.ranks} rank{'s' if layout.ranks > 1 else ''}",
            "",
            "mesh: pipelines run to the right, data-parallel copies stand below each other, [tensor group]",
            *mesh_picture(layout.mesh, WIDTH),
            "",
            f"schedule {layout.schedule}: time to the right, a backward takes two forwards, · is idle",
            *time_picture(timeline, WIDTH),
            "",
            *_facts(layout, schedule, timeline),
            *_states(layout, rank),
            "",
            f"program of rank {rank} ({place}; {held})",
            *program_picture(program, WIDTH),
        )
    )


def _forwards(op: Op) -> int:
    """The time of an op in units of a forward; two matrix products in the backward for each in the forward."""
    match op.kind:
        case Kind.FORWARD:
            return 1
        case Kind.BACKWARD:
            return 2
        case _:
            assert_never(op.kind)


def _cut(layout: Layout, layers_per_stage: int, spec: GPTSpec | None) -> Cut:
    if spec is None:
        return Cut(tuple(stage * layers_per_stage for stage in range(layout.pipeline + 1)))
    rows = sheet(spec)
    ties = (Tie("tied", (0, len(rows) - 1)),) if spec.tied else ()
    return Cut(balance([row.flops for row in rows], layout.pipeline), ties)


def _facts(layout: Layout, schedule: Schedule, timeline: Timeline) -> Iterator[str]:
    """The bubble and the activations held, each beside what theory says."""
    p, m = layout.pipeline, layout.micro_batches
    simulated = Fraction(timeline.bubble)
    yield (
        f"bubble      {simulated} = {float(simulated):.1%} simulated;"
        f" (p-1)/(m+p-1) = {bubble(p, m)} in theory, for p={p} and m={m}"
    )
    numbers = _numbers([schedule.in_flight(stage) for stage in range(p)])
    yield f"in flight   {numbers} micro-batches at most, by pipeline rank; {_theory(layout.schedule)} in theory"


def _states(layout: Layout, rank: int) -> Iterator[str]:
    """How the model states are divided, over which ranks, and where they lie."""
    sharding = row(layout.effective_zero)

    def part(divided: bool) -> str:
        return f"1/{layout.shards}" if divided else "whole"

    host = " on its host" if layout.offload else ""
    yield (
        f"zero {int(layout.zero)}      parameters {part(sharding.parameters)}, gradients {part(sharding.gradients)},"
        f" optimizer states {part(sharding.optimizer)}{host} on each data-parallel rank"
    )
    if sharding.parameters:
        yield f"gathered    at most {layout.prefetch + 1} at a time: the layer in use and {layout.prefetch} on the way"
    if layout.replicas > 1:
        run, peers = (groups(rank, layout.shards) for groups in (layout.mesh.shard_group, layout.mesh.replica_group))
        yield f"shards      {layout.shards} ranks divide the states, those with rank {rank}: {_numbers(run)}"
        yield f"replicas    {layout.replicas} ranks hold each part, that of rank {rank}: {_numbers(peers)}"


def _numbers(numbers: Sequence[int]) -> str:
    """The numbers in a row, those in the middle of a long one left out."""
    shown = excerpt(len(numbers), 10)
    first, last = (" ".join(str(numbers[index]) for index in part) for part in (shown.first, shown.last))
    return f"{first} ... {last}" if shown.hidden else first


def _theory(name: ScheduleName) -> str:
    match name:
        case ScheduleName.GPIPE:
            return "m"
        case ScheduleName.ONE_F_ONE_B:
            return "min(m, p - rank)"
        case _:
            assert_never(name)
