"""The law of the house: any layout computes the same loss, gradients, norm and weights as one process.

Float64, three steps of AdamW with clipping, dropout on, uneven batches, ignored tokens. The one process is a plain
torch loop (`train.parity.reference`), which shares no parallel code with what it judges.
"""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.comm.connect import Groups
from meshwright.costs.spec import GPTSpec
from meshwright.layout.layout import Layout, Recompute, ScheduleName
from meshwright.layout.mesh import Mesh
from meshwright.layout.zero import ZeroStage
from meshwright.train.parity import Case, Deviations, deviations
from pool import RankPool

TOLERANCE = 1e-10


def meshes(smallest: int, largest: int) -> list[Mesh]:
    """Every d x t x p with a product between the two."""
    sizes = range(1, largest + 1)
    every = (Mesh(data=d, pipeline=p, tensor=t) for d, p, t in product(sizes, sizes, sizes))
    return [mesh for mesh in every if smallest <= mesh.size <= largest]


def case_for(tensor: int, pipeline: int, tied: bool, bias: bool = True) -> Case:
    """A model that `tensor` ranks can cut (heads) and `pipeline` ranks can share (layers), with odd sizes elsewhere."""
    heads = tensor if tensor in (3, 5, 6, 7, 8) else 4
    spec = GPTSpec(
        layers=max(2, pipeline - 2),
        hidden=2 * heads,
        heads=heads,
        sequence=5,
        vocabulary=13,
        tied=tied,
        bias=bias,
        dropout=0.2,
    )
    return Case(spec)


Variant = tuple[ZeroStage, ScheduleName, Recompute, bool]

EVERY = tuple(product(ZeroStage, ScheduleName, Recompute, (True, False)))
# Each stage, and each value of everything else with two others.
FEW = tuple(
    (zero, schedule, recompute, tied)
    for zero, (schedule, recompute, tied) in zip(
        ZeroStage,
        [
            (ScheduleName.ONE_F_ONE_B, Recompute.NONE, True),
            (ScheduleName.GPIPE, Recompute.FULL, True),
            (ScheduleName.GPIPE, Recompute.NONE, False),
            (ScheduleName.ONE_F_ONE_B, Recompute.FULL, False),
        ],
        strict=True,
    )
)


def variants_on_rank(groups: Groups, mesh: Mesh, variants: tuple[Variant, ...]) -> dict[str, Deviations]:
    """On one rank: each ZeRO stage x schedule x recompute mode x tied or not, over `mesh`."""
    found = {}
    for zero, schedule, recompute, tied in variants:
        layout = Layout(mesh.data, mesh.tensor, mesh.pipeline, zero, schedule, 3, recompute)
        result = deviations(groups, case_for(mesh.tensor, mesh.pipeline, tied), layout)
        found[f"{layout}{' tied' if tied else ''}"] = result
    return found


def check(pool: RankPool, mesh: Mesh, variants: tuple[Variant, ...] = EVERY) -> None:
    for name, result in pool.run(mesh, variants_on_rank, mesh, variants, limit=300)[0].items():
        assert result.largest <= TOLERANCE, f"{name}: {result}"


@pytest.mark.parametrize("mesh", meshes(1, 4), ids=str)
def test_every_layout_up_to_four_ranks_equals_one_process(pool: RankPool, mesh: Mesh) -> None:
    check(pool, mesh)


@pytest.mark.parametrize("mesh", meshes(2, 4), ids=str)
def test_every_stage_over_gloo_equals_one_process(gloo_pool: RankPool, mesh: Mesh) -> None:
    check(gloo_pool, mesh, FEW)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mesh", meshes(2, 4), ids=str)
def test_every_layout_over_gloo_equals_one_process(gloo_pool: RankPool, mesh: Mesh) -> None:
    check(gloo_pool, mesh)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mesh", meshes(5, 8), ids=str)
def test_every_layout_up_to_eight_ranks_equals_one_process(pool: RankPool, mesh: Mesh) -> None:
    check(pool, mesh)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, Case]:
    mesh = draw(st.sampled_from(meshes(1, 4)))
    layout = Layout(
        mesh.data,
        mesh.tensor,
        mesh.pipeline,
        draw(st.sampled_from(ZeroStage)),
        draw(st.sampled_from(ScheduleName)),
        draw(st.integers(1, 6)),
        draw(st.sampled_from(Recompute)),
    )
    spec = GPTSpec(
        layers=draw(st.integers(max(1, mesh.pipeline - 2), 5)),
        hidden=12 * draw(st.integers(1, 2)),
        heads=12,
        sequence=draw(st.integers(1, 7)),
        vocabulary=draw(st.integers(2, 40)),
        tied=draw(st.booleans()),
        bias=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.1, 0.5])),
    )
    smoothing = draw(st.sampled_from([0.0, 0.1]))
    return layout, Case(
        spec, batch=draw(st.integers(1, 9)), steps=2, label_smoothing=smoothing, seed=draw(st.integers(0, 99))
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layouts())
def test_layouts_that_nobody_listed_equal_one_process(pool: RankPool, drawn: tuple[Layout, Case]) -> None:
    layout, case = drawn
    result = pool.run(layout.mesh, deviations, case, layout)[0]
    assert result.largest <= TOLERANCE, result
