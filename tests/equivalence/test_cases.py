"""Faults that users of other systems met, as conditions in which our numbers must stay those of one process.

Each test says whose report its condition comes from.
"""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.comm.connect import Groups, solo
from meshwright.costs.spec import GPTSpec
from meshwright.engine.build import build
from meshwright.engine.engine import Engine
from meshwright.layout.layout import Layout
from meshwright.layout.mesh import Axis, Mesh
from meshwright.layout.share import micro_batch_samples
from meshwright.model.batch import IGNORED, MicroBatch
from meshwright.train.parity import Case, deviations, make_engine, part_of, train_step, whole_batch
from pool import RankPool

SPEC = GPTSpec(layers=2, hidden=8, heads=4, sequence=4, vocabulary=13, dropout=0.1)


def sgd(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def gradients(engine: Engine, batches: list[MicroBatch]) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, norm and complete gradients of one step, as this rank's stage sees them."""
    found: dict[str, torch.Tensor] = {}

    def look() -> None:
        found.update({tensor.name: tensor.value.clone() for tensor in engine.global_tensors(gradients=True)})

    result = engine.step(batches, 0.1, look)
    return result.loss, result.gradient_norm, found


# --- Megatron#1304, #1778: 30 layers on 4 stages, of which 28 were built --------------------------------------------


def layers_here(groups: Groups, layout: Layout) -> list[int]:
    spec = GPTSpec(layers=30, hidden=4, heads=1, sequence=4, vocabulary=13)
    return list(build(spec, layout, groups, sgd).stage.layers)


def test_thirty_blocks_on_four_stages_are_all_built_once(pool: RankPool) -> None:
    layout = Layout(pipeline=4, micro_batches=4)
    stages = pool.run(layout.mesh, layers_here, layout)
    assert [layer for stage in stages for layer in stage] == list(range(32))
    blocks = [len([layer for layer in stage if 1 <= layer <= 30]) for stage in stages]
    assert sorted(blocks) == [7, 7, 8, 8]


# --- Megatron#844: a tied embedding over two stages, data parallel, optimizer sharded --------------------------------


def tied_copies(groups: Groups, layout: Layout) -> torch.Tensor:
    """The token embedding as this rank holds it after three steps."""
    case = Case(SPEC)
    engine = make_engine(case, layout, groups)
    for step in range(case.steps):
        train_step(engine, case, step, lambda: None)
    unit = engine.stage.units["tied"]
    return unit.collect(unit.owned_value)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_both_copies_of_a_tied_embedding_stay_equal_and_right(pool: RankPool, zero: int) -> None:
    layout = Layout(data=2, pipeline=2, zero=zero, micro_batches=2)  # type: ignore[arg-type]
    copies = pool.run(layout.mesh, tied_copies, layout)
    assert all(torch.equal(copies[0], copy) for copy in copies)
    assert pool.run(layout.mesh, deviations, Case(SPEC), layout)[0].largest < 1e-10


# --- DeepSpeed PR#5411 and others: the norm counted replicas several times ------------------------------------------


def norms(groups: Groups, layout: Layout) -> tuple[float, float]:
    """The engine's norm, and that of the gathered gradients of this rank's stage."""
    case = Case(SPEC)
    engine = make_engine(case, layout, groups)
    _, norm, found = gradients(
        engine,
        [
            part_of(whole_batch(case, 0), samples, case, 0)
            for samples in micro_batch_samples(case.batch, layout, groups.data.index)
        ],
    )
    return norm, sum(float(value.square().sum()) for value in found.values())


@pytest.mark.parametrize(
    "text",
    [
        "tp4",
        "tp2.pp2",
        "dp4",
        "dp2.tp2/zero1",
        "dp2.pp2/zero2",
        "dp2.tp2/zero3",
        "dp4/zero1/shard2",
        "dp4/zero3/shard2",
    ],
)
def test_the_norm_counts_every_unique_element_once(pool: RankPool, text: str) -> None:
    layout = Layout.parse(text)
    answers = pool.run(layout.mesh, norms, layout)
    stages = [answers[layout.mesh.group(Axis.PIPELINE, 0)[stage]][1] for stage in range(layout.pipeline)]
    for norm, _ in answers:
        assert norm == pytest.approx(math.sqrt(sum(stages)), rel=1e-12)


# --- DeepSpeed#7773, #8152, torchtitan#1733, NeMo#8343: how the batch is cut into micro-batches ---------------------


def one_step(groups: Groups, layout: Layout, case: Case) -> tuple[float, float, dict[str, torch.Tensor]]:
    engine = make_engine(case, layout, groups)
    whole = whole_batch(case, 0)
    samples = micro_batch_samples(case.batch, layout, groups.data.index)
    return gradients(engine, [part_of(whole, part, case, 0) for part in samples])


@pytest.mark.parametrize("text", ["dp1", "pp2", "pp2/gpipe", "dp2", "dp2/zero1", "dp2/zero2", "dp2/zero3"])
def test_any_number_of_micro_batches_gives_the_same_gradient(pool: RankPool, text: str) -> None:
    case = Case(SPEC, batch=16)
    layout = Layout.parse(text)
    results = []
    for m in (1, 2, 4, 16):
        cut = Layout(layout.data, layout.tensor, layout.pipeline, layout.zero, layout.schedule, m)
        results.append(pool.run(cut.mesh, one_step, cut, case)[0])
    loss, norm, found = results[0]
    for other_loss, other_norm, other in results[1:]:
        assert other_loss == pytest.approx(loss, rel=1e-13)
        assert other_norm == pytest.approx(norm, rel=1e-13)
        for name, gradient in found.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-10, atol=1e-14)


# --- torchtitan#2972, #1842, PR#4167: ranks with unequal numbers of valid tokens ------------------------------------


def unequal(groups: Groups, layout: Layout) -> tuple[float, int]:
    """Data rank 0 has one valid token a sample, rank 1 has all four."""
    engine = build(SPEC, layout, groups, sgd, dtype=torch.float64)
    tokens = torch.arange(8).view(2, 4)
    targets = (tokens + 1).clone()
    if groups.data.index == 0:
        targets[:, 1:] = IGNORED
    batches = [MicroBatch(tokens[row : row + 1], targets[row : row + 1]) for row in range(2)]
    result = engine.step(batches, 0.1)
    return result.loss, result.tokens


def token_losses() -> torch.Tensor:
    """The loss of each of the eight tokens, one by one, in one process."""
    tokens = torch.arange(8).view(2, 4)
    losses = torch.zeros(2, 4, dtype=torch.float64)
    for row in range(2):
        for column in range(4):
            engine = build(SPEC, Layout(), solo(), sgd, dtype=torch.float64)
            targets = torch.full((1, 4), IGNORED)
            targets[0, column] = tokens[row, column] + 1
            losses[row, column] = engine.evaluate([MicroBatch(tokens[row : row + 1], targets)]).loss
    return losses


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_loss_is_the_sum_over_tokens_by_the_tokens_of_the_whole_batch(
    pool: RankPool, zero: int, pipeline: int
) -> None:
    layout = Layout(data=2, pipeline=pipeline, micro_batches=2, zero=zero)  # type: ignore[arg-type]
    losses = token_losses()
    expected = float(losses[:, 0].sum() + losses.sum()) / 10
    for loss, tokens in pool.run(layout.mesh, unequal, layout):
        assert tokens == 10
        assert loss == pytest.approx(expected, rel=1e-12)


def nothing_valid(groups: Groups) -> str:
    engine = build(SPEC, Layout(data=2), groups, sgd)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="no token to learn from") as raised:
        engine.step([MicroBatch(tokens, torch.full_like(tokens, IGNORED))], 0.1)
    return str(raised.value)


def test_a_batch_without_any_valid_token_is_refused_on_every_rank(pool: RankPool) -> None:
    assert len(pool.run(Mesh(data=2), nothing_valid)) == 2


# --- DeepSpeed PR#7985: with bf16 the last micro-batch was not reduced like the others ------------------------------


def bf16_step(groups: Groups, layout: Layout) -> dict[str, torch.Tensor]:
    case = Case(SPEC, batch=8)
    engine = build(SPEC, layout, groups, sgd, seed=case.seed, dtype=torch.bfloat16)
    whole = whole_batch(case, 0)
    samples = micro_batch_samples(case.batch, layout, groups.data.index)
    return gradients(engine, [part_of(whole, part, case, 0) for part in samples])[2]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_last_of_four_bf16_micro_batches_counts_like_the_others(pool: RankPool, zero: int) -> None:
    exact = one_step(solo(), Layout(), Case(SPEC, batch=8))[2]
    layout = Layout(data=2, zero=zero, micro_batches=4)  # type: ignore[arg-type]
    for found in pool.run(layout.mesh, bf16_step, layout):
        for name, gradient in exact.items():
            error = (found[name].double() - gradient).norm() / gradient.norm()
            # Losing one of eight micro-batches is an error of a third or more; bf16 rounding stays far below.
            assert error < 0.05, f"{name}: {error}"


# --- DeepSpeed PR#7981, #7967: ZeRO-2 with several backward passes before the step -----------------------------------


@pytest.mark.parametrize("zero", [2, 3])
def test_several_backward_passes_before_a_step_equal_one_big_batch(pool: RankPool, zero: int) -> None:
    case = Case(SPEC, batch=12)
    one = one_step(solo(), Layout(), case)[2]
    layout = Layout(data=2, zero=zero, micro_batches=6)  # type: ignore[arg-type]
    for _, _, found in pool.run(layout.mesh, one_step, layout, case):
        for name, gradient in one.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-14)


# --- torchtitan#775: fewer micro-batches than stages ------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_fewer_micro_batches_than_stages_run_and_are_right(pool: RankPool, m: int, schedule: str) -> None:
    layout = Layout(pipeline=4, micro_batches=m, schedule=schedule)  # type: ignore[arg-type]
    assert pool.run(layout.mesh, deviations, Case(SPEC), layout)[0].largest < 1e-10


# --- DeepSpeed#2223, torchtitan#1618: data ranks with unequal numbers of batches ------------------------------------


def two_one_one(groups: Groups, layout: Layout) -> tuple[float, dict[str, torch.Tensor]]:
    """Data rank 0 has two batches, ranks 1 and 2 one: they join the second with an empty one."""
    case = Case(SPEC, batch=4)
    whole = whole_batch(case, 0)
    own = [(range(0, 1), range(1, 2)), (range(2, 3), range(4, 4)), (range(3, 4), range(4, 4))][groups.data.index]
    loss, _, found = gradients(make_engine(case, layout, groups), [part_of(whole, part, case, 0) for part in own])
    return loss, found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_data_ranks_with_two_one_and_one_batches_equal_one_process(pool: RankPool, zero: int) -> None:
    loss, _, expected = one_step(solo(), Layout(), Case(SPEC, batch=4))
    layout = Layout(data=3, zero=zero, micro_batches=2)  # type: ignore[arg-type]
    for other, found in pool.run(layout.mesh, two_one_one, layout):
        assert other == pytest.approx(loss, rel=1e-13)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-14)


# --- DeepSpeed PR#7171 (and every loss that diverged): a gradient that is not finite ---------------------------------


def poisoned(groups: Groups, layout: Layout) -> tuple[bool, bool, bool]:
    """One data rank's gradient is infinite for a step: is it skipped, are the weights kept, does training go on?"""
    case = Case(SPEC)
    engine = make_engine(case, layout, groups)
    before = [tensor.value.clone() for tensor in engine.global_tensors()]
    hook = None
    if groups.data.index == 1:
        parameter = next(iter(engine.stage.layers[1].parameters()))
        hook = parameter.register_hook(lambda gradient: gradient * math.inf)
    skipped = train_step(engine, case, 0, lambda: None).skipped
    if hook is not None:
        hook.remove()
    after = [tensor.value.clone() for tensor in engine.global_tensors()]
    unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return skipped, unchanged, not train_step(engine, case, 1, lambda: None).skipped


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(pool: RankPool, zero: int) -> None:
    layout = Layout(data=2, zero=zero)  # type: ignore[arg-type]
    assert pool.run(layout.mesh, poisoned, layout) == [(True, True, True)] * 2
