"""What is sent and what is held, counted on real ranks and equal to the papers' formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.comm.connect import Groups
from meshwright.comm.ledger import Kind
from meshwright.costs.sheet import parameters
from meshwright.costs.spec import GPTSpec
from meshwright.costs.traffic import data_parallel
from meshwright.engine.build import build
from meshwright.engine.engine import Engine
from meshwright.layout.layout import Layout
from meshwright.layout.share import micro_batch_samples
from meshwright.layout.zero import StateBytes, ZeroStage, model_state_bytes
from meshwright.model.batch import MicroBatch
from meshwright.parallel.precision import Precision
from meshwright.train.summary import formula
from pool import RankPool

# Sizes that 2 and 4 divide, so that no unit is padded and the formulas hold to the byte.
SPEC = GPTSpec(layers=2, hidden=32, heads=4, sequence=8, vocabulary=64, tied=False)


def adam(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-3, fused=True)


def trained(groups: Groups, layout: Layout, spec: GPTSpec = SPEC, batch: int = 8) -> Engine:
    """One step done, the ledger holding that step alone."""
    engine = build(spec, layout, groups, adam)
    tokens = torch.arange(batch * spec.sequence).view(batch, -1) % spec.vocabulary
    groups.ledger.clear()
    engine.step(
        [
            MicroBatch(tokens[part.start : part.stop], tokens[part.start : part.stop])
            for part in micro_batch_samples(batch, layout, groups.data.index)
        ],
        1e-3,
    )
    return engine


# --- traffic ----------------------------------------------------------------------------------------------------------


def sent_for_data_parallelism(groups: Groups, layout: Layout) -> tuple[int, int]:
    trained(groups, layout)
    gradients = groups.ledger.total(axis="data", label="gradients").sent
    return gradients, groups.ledger.total(axis="data", label="parameters").sent


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("data", [2, 4])
@pytest.mark.parametrize("zero", ZeroStage)
def test_traffic_of_each_zero_stage_equals_the_papers(gloo_pool: RankPool, zero: ZeroStage, data: int, m: int) -> None:
    layout = Layout(data=data, zero=zero, micro_batches=m)
    expected = 4 * data_parallel(parameters(SPEC), data, zero, m)
    for gradients, weights in gloo_pool.run(layout.mesh, sent_for_data_parallelism, layout):
        assert gradients + weights == expected
        assert (weights > 0) == (zero > 0)


def test_in_multiples_of_the_model_one_micro_batch_sends_2_2_2_and_3(gloo_pool: RankPool) -> None:
    whole = 4 * parameters(SPEC)
    multiples = []
    for zero in ZeroStage:
        layout = Layout(data=4, zero=zero)
        sent = sum(gloo_pool.run(layout.mesh, sent_for_data_parallelism, layout)[0])
        multiples.append(sent * 4 / 3 / whole)  # the papers leave out the factor (d-1)/d
    assert multiples == [2, 2, 2, 3]


def tensor_calls(groups: Groups, layout: Layout, spec: GPTSpec) -> tuple[int, int]:
    trained(groups, layout, spec)
    forward = groups.ledger.total(Kind.ALL_REDUCE, "tensor", "tensor-forward").calls
    return forward, groups.ledger.total(Kind.ALL_REDUCE, "tensor", "tensor-backward").calls


@pytest.mark.parametrize("m", [1, 3])
def test_a_transformer_layer_makes_four_all_reduces_per_micro_batch(gloo_pool: RankPool, m: int) -> None:
    layout = Layout(tensor=2, micro_batches=m)
    few, many = (GPTSpec(layers=layers, hidden=32, heads=4, sequence=8, vocabulary=64) for layers in (2, 5))
    fewer, more = (gloo_pool.run(layout.mesh, tensor_calls, layout, spec)[0] for spec in (few, many))
    assert more[0] - fewer[0] == 3 * 2 * m
    assert more[1] - fewer[1] == 3 * 2 * m


def pipeline_messages(groups: Groups, layout: Layout) -> tuple[int, int]:
    trained(groups, layout)
    down = groups.ledger.total(Kind.SEND, "pipeline", "activations").sent
    return down, groups.ledger.total(Kind.SEND, "pipeline", "gradients").sent


def test_a_stage_sends_its_boundary_once_per_micro_batch_and_direction(gloo_pool: RankPool) -> None:
    layout = Layout(pipeline=3, micro_batches=4)
    boundary = 8 * SPEC.sequence * SPEC.hidden * 4  # all samples of the step
    assert gloo_pool.run(layout.mesh, pipeline_messages, layout) == [(boundary, 0), (boundary, boundary), (0, boundary)]


# --- memory -----------------------------------------------------------------------------------------------------------


def held(groups: Groups, layout: Layout) -> StateBytes:
    return trained(groups, layout).state_bytes()


@pytest.mark.parametrize("zero", ZeroStage)
def test_bytes_of_model_states_equal_the_article(gloo_pool: RankPool, zero: ZeroStage) -> None:
    layout = Layout(data=4, zero=zero)
    expected = model_state_bytes(parameters(SPEC), 4, zero, StateBytes(4, 4, 8))
    assert gloo_pool.run(layout.mesh, held, layout) == [expected] * 4


def held_and_formula(groups: Groups, layout: Layout, spec: GPTSpec) -> tuple[StateBytes, StateBytes]:
    engine = trained(groups, layout, spec)
    return engine.state_bytes(), formula(spec, layout, engine.stage.cut, Precision.of(torch.float32))[groups.rank]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("text", ["dp2", "dp2.tp2/zero1", "dp2.pp2/zero3/m2", "tp2.pp2/m2", "dp2.tp2/zero2", "tp4"])
def test_bytes_divided_by_every_axis_equal_the_summary_of_a_run(gloo_pool: RankPool, text: str, tied: bool) -> None:
    layout = Layout.parse(text)
    spec = replace(SPEC, tied=tied)
    for measured, expected in gloo_pool.run(layout.mesh, held_and_formula, layout, spec):
        assert measured == expected


def held_sharing(groups: Groups, layout: Layout) -> tuple[StateBytes, bool]:
    return trained(groups, layout).state_bytes(), groups.data.shares_memory


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_ranks_that_share_memory_hold_the_whole_parameters_once_together(pool: RankPool, zero: int) -> None:
    layout = Layout(data=4, zero=zero)  # type: ignore[arg-type]
    whole = 4 * parameters(SPEC)
    for held_bytes, sharing in pool.run(layout.mesh, held_sharing, layout):
        if not sharing:
            pytest.skip("the ranks of this host do not share memory")
        assert held_bytes.parameters == whole // 4
        assert held_bytes.optimizer == 2 * whole // 4


def gradient_buffers(groups: Groups, layout: Layout, layers: int) -> int:
    spec = replace(SPEC, layers=layers)
    engine = trained(groups, layout, spec)
    return next(iter(engine.stage.units.values())).gradient.pool.made


@pytest.mark.parametrize("zero", [2, 3])
def test_gradient_buffers_do_not_grow_with_the_model(gloo_pool: RankPool, zero: int) -> None:
    layout = Layout(data=2, zero=zero, micro_batches=2)  # type: ignore[arg-type]
    small, large = (gloo_pool.run(layout.mesh, gradient_buffers, layout, layers)[0] for layers in (2, 20))
    assert small == large <= 4


def whole_units(groups: Groups, layout: Layout) -> int:
    """The most bytes of whole parameters that exist at any action of a step."""
    spec = replace(SPEC, layers=6)
    engine = build(spec, layout, groups, adam)
    most = 0
    original = engine._interpreter._act

    def watching(*arguments: object) -> None:
        nonlocal most
        original(*arguments)  # type: ignore[arg-type]
        most = max(most, sum(unit._whole.held_bytes for unit in engine.stage.units.values()))

    engine._interpreter._act = watching  # type: ignore[assignment,method-assign]
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    engine.step([MicroBatch(tokens, tokens)], 1e-3)
    return most


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_stage_3_holds_one_whole_unit_and_those_that_are_prefetched(gloo_pool: RankPool, prefetch: int) -> None:
    layout = Layout(data=2, zero=3, prefetch=prefetch)  # type: ignore[arg-type]
    block = 12 * 32**2 + 13 * 32
    assert gloo_pool.run(layout.mesh, whole_units, layout) == [4 * block * (prefetch + 1)] * 2
