"""16-bit training with float32 masters: its bytes, its numbers under every stage, and overflow in float16."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.comm.connect import Groups, solo
from meshwright.costs.sheet import parameters
from meshwright.costs.spec import GPTSpec
from meshwright.engine.build import build
from meshwright.engine.engine import Engine, StepResult
from meshwright.layout.layout import Layout
from meshwright.layout.share import micro_batch_samples
from meshwright.layout.zero import MIXED_ADAM, StateBytes, ZeroStage, model_state_bytes
from meshwright.model.batch import MicroBatch
from meshwright.parallel.precision import LossScale, Precision
from pool import RankPool

SPEC = GPTSpec(layers=2, hidden=32, heads=4, sequence=8, vocabulary=64)


def adam(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-3, fused=True)


def step(engine: Engine, number: int, rate: float = 1e-3) -> StepResult:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(64, (8, 9), generator=generator)
    return engine.step(
        [
            MicroBatch(tokens[part.start : part.stop, :-1], tokens[part.start : part.stop, 1:])
            for part in micro_batch_samples(8, engine.layout, engine.groups.data.index)
        ],
        rate,
    )


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    return {tensor.name: tensor.value.clone() for tensor in engine.global_tensors()}


# --- bytes ------------------------------------------------------------------------------------------------------------


def held(groups: Groups, layout: Layout, dtype: torch.dtype) -> StateBytes:
    engine = build(SPEC, layout, groups, adam, dtype=dtype)
    step(engine, 0)
    return engine.state_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero", ZeroStage)
def test_mixed_precision_takes_16_bytes_per_parameter_divided_as_in_the_paper(
    gloo_pool: RankPool, zero: ZeroStage, dtype: torch.dtype
) -> None:
    layout = Layout(data=4, zero=zero)
    expected = model_state_bytes(parameters(SPEC), 4, zero, MIXED_ADAM)
    assert gloo_pool.run(layout.mesh, held, layout, dtype) == [expected] * 4


def test_the_precisions_say_what_adam_takes() -> None:
    assert Precision.of(torch.bfloat16).adam_bytes == MIXED_ADAM
    assert Precision.of(torch.float32).adam_bytes == StateBytes(4, 4, 8)
    assert Precision.of(torch.float64).adam_bytes == StateBytes(8, 8, 16)


# --- numbers ----------------------------------------------------------------------------------------------------------


def momentum(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def trained(groups: Groups, layout: Layout, dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = build(SPEC, layout, groups, momentum, dtype=dtype, clip=0.5)
    losses = [step(engine, number, rate=0.1).loss for number in range(4)]
    return losses, weights(engine)


def unclipped(groups: Groups, layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    engine = build(SPEC, layout, groups, adam, dtype=dtype)
    for number in range(3):
        step(engine, number)
    return weights(engine)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_stage_trains_bit_for_bit_like_stage_0_with_one_micro_batch(pool: RankPool, dtype: torch.dtype) -> None:
    layouts = [Layout(data=2, zero=zero) for zero in ZeroStage]
    expected = pool.run(layouts[0].mesh, unclipped, layouts[0], dtype)[0]
    for layout in layouts[1:]:
        for name, value in pool.run(layout.mesh, unclipped, layout, dtype)[0].items():
            assert torch.equal(value, expected[name]), (layout, name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_stage_trains_like_stage_0_to_rounding_with_several_micro_batches_and_clipping(
    pool: RankPool, dtype: torch.dtype
) -> None:
    # Stages 0 and 1 sum over micro-batches before they sum over ranks, 2 and 3 after; and the norm, which clips, is
    # summed over shards in another order. In 16 bits a gradient is rounded to 8 or 11 bits in between. Not with Adam,
    # which makes whole steps of rounding errors where the gradient is zero, as that of the keys' bias.
    rounding = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 1e-2}[dtype]
    layouts = [Layout(data=2, zero=zero, micro_batches=m) for zero in ZeroStage for m in (1, 4)]
    expected_losses, expected = pool.run(layouts[0].mesh, trained, layouts[0], dtype)[0]
    for layout in layouts[1:]:
        losses, found = pool.run(layout.mesh, trained, layout, dtype)[0]
        assert losses == pytest.approx(expected_losses, rel=rounding)
        for name, value in expected.items():
            torch.testing.assert_close(found[name].double(), value.double(), rtol=rounding, atol=rounding / 10)


def test_masters_add_up_updates_that_16_bits_would_lose() -> None:
    engine = build(SPEC, Layout(), solo(), adam, dtype=torch.bfloat16)
    before = weights(engine)["head.norm.weight"]
    for _ in range(80):
        step(engine, 0, rate=1e-4)  # 1 - 1e-4 rounds to 1 in bfloat16
    assert (weights(engine)["head.norm.weight"] != before).float().mean() > 0.3


def test_bfloat16_training_follows_float32() -> None:
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        engine = build(SPEC, Layout(), solo(), adam, dtype=dtype)
        losses.append([step(engine, number % 2, rate=1e-2).loss for number in range(20)])
    assert losses[0][-1] < 0.6 * losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


# --- overflow (Bridge PR#5591, DeepSpeed PR#7645: one rank overflowed and the others went on) -------------------------


def overflow(groups: Groups, layout: Layout) -> tuple[bool, bool, float, float, int]:
    engine = build(SPEC, layout, groups, adam, dtype=torch.float16)
    step(engine, 0)
    before, scale, moments = weights(engine), engine.loss_scale.value, engine.optimizer.state_bytes
    hook = None
    if groups.data.index == 1:
        parameter = next(engine.stage.layers[1].parameters())
        hook = parameter.register_hook(lambda gradient: gradient * math.inf)
    skipped = step(engine, 1).skipped
    if hook is not None:
        hook.remove()
    unchanged = all(torch.equal(value, before[name]) for name, value in weights(engine).items())
    after = engine.loss_scale.value
    assert not step(engine, 2).skipped
    assert engine.optimizer.state_bytes == moments
    return skipped, unchanged, scale, after, len(before)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_overflow_on_one_rank_skips_the_step_and_halves_the_scale_on_all(pool: RankPool, zero: int) -> None:
    layout = Layout(data=2, zero=zero)  # type: ignore[arg-type]
    for skipped, unchanged, before, after, _ in pool.run(layout.mesh, overflow, layout):
        assert skipped
        assert unchanged
        assert after == before / 2


Spoiled = tuple[int, str]
"""The rank whose gradient is spoiled, and the parameter."""


def spoiled(groups: Groups, layout: Layout, dtype: torch.dtype, where: Spoiled, value: float) -> list[object]:
    """What is said of a step whose first micro-batch has a gradient that is not finite on one rank."""
    engine = build(SPEC, layout, groups, adam, dtype=dtype, clip=1.0)
    step(engine, 0)
    before, moments = weights(engine), [m.clone() for m in remembered(engine)]
    units = [(unit, slot) for unit in engine.stage.units.values() for slot in unit.slots if slot.name == where[1]]
    if groups.rank == where[0]:
        ((unit, slot),) = units
        start_reduce = unit.gradient.start_reduce

        def spoil() -> None:
            unit.gradient.open()[slot.start] = value
            unit.gradient.start_reduce = start_reduce  # type: ignore[method-assign]
            start_reduce()

        unit.gradient.start_reduce = spoil  # type: ignore[method-assign]
    result = step(engine, 1)
    same = all(torch.equal(known, before[name]) for name, known in weights(engine).items())
    same &= all(torch.equal(now, then) for now, then in zip(remembered(engine), moments, strict=True))
    assert result.fault is not None
    assert result.skipped
    after = step(engine, 2)
    assert math.isfinite(after.gradient_norm)
    assert all(known.isfinite().all() for known in weights(engine).values())
    return [result.fault.rank, result.fault.parameter, same, after.fault]


def remembered(engine: Engine) -> list[torch.Tensor]:
    """Moments and counts of steps of this rank."""
    found = [one._optimizer for one in engine.optimizer._optimizers if one._optimizer is not None]
    return [known for optimizer in found for states in optimizer.state.values() for known in states.values()]


# The embedding is on the first stage, the last norm on the last; what is inside is cut over the tensor axis.
FAULTS: list[tuple[str, Spoiled]] = [
    ("dp2", (1, "blocks.0.mlp.up.weight")),
    ("dp2/zero1/m2", (1, "blocks.1.attention.qkv.bias")),
    ("dp2/zero2/m2", (1, "head.norm.weight")),
    ("dp2/zero3/m2", (1, "blocks.0.mlp.up.weight")),
    ("dp4/zero3/shard2", (3, "blocks.0.mlp.up.weight")),
    ("dp2.pp2/zero3/m2", (2, "blocks.0.mlp.up.weight")),
    ("dp2.pp2/zero1/m4", (3, "head.norm.weight")),
    ("dp2.tp2/zero3", (1, "blocks.1.attention.qkv.weight")),
    ("dp2.tp2/zero2", (2, "blocks.1.mlp.up.weight")),
    ("tp2.pp2/m2", (3, "head.norm.weight")),
]


@pytest.mark.parametrize(("text", "where"), FAULTS)
def test_a_gradient_that_is_not_finite_is_named_by_all_ranks_and_changes_nothing(
    gloo_pool: RankPool, text: str, where: Spoiled
) -> None:
    layout = Layout.parse(text)
    for dtype, value in ((torch.float32, math.nan), (torch.float16, math.inf)):
        for found in gloo_pool.run(layout.mesh, spoiled, layout, dtype, where, value):
            assert found == [*where, True, None]


def test_the_scale_grows_after_patience_and_never_falls_below_one() -> None:
    scale = LossScale(torch.float16, initial=4.0, patience=3)
    for _ in range(3):
        scale.update(finite=True)
    assert scale.value == 8
    for _ in range(10):
        scale.update(finite=False)
    assert scale.value == 1
    scale.update(finite=True)
    scale.update(finite=True)
    assert scale.value == 1
    scale.update(finite=True)
    assert scale.value == 2


def test_other_dtypes_are_not_scaled() -> None:
    scale = LossScale(torch.bfloat16)
    scale.update(finite=False)
    assert scale.value == 1


def test_float16_gradients_too_small_to_represent_survive_the_scale() -> None:
    engines = [build(SPEC, Layout(), solo(), adam, dtype=dtype) for dtype in (torch.float32, torch.float16)]
    norms = [step(engine, 0).gradient_norm for engine in engines]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
