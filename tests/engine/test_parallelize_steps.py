"""What ranks may do differently, what is done by hand, what is skipped and what is sent, held and told apart."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from any_module import Layer
from torch import Tensor, nn

from meshwright import LossSum, Parallel, parallelize
from meshwright.comm.connect import Groups
from meshwright.costs.traffic import data_parallel
from meshwright.layout.layout import Layout
from meshwright.layout.zero import MIXED_ADAM, StateBytes, model_state_bytes
from pool import RankPool

STAGES = ["dp2", "dp2/zero1", "dp2/zero2", "dp2/zero3"]


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def momentum(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9, dampening=0.5, weight_decay=0.1)


# --- control flow that differs between ranks, micro-batches and steps -------------------------------------------------


class Paths(nn.Module):
    """Goes through its layers in the order it is told, as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(6) for _ in range(4))
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor, path: tuple[int, ...]) -> Tensor:
        for index in path:
            x = self.layers[index](x)
        y: Tensor = self.last(x)
        return y


Sample = tuple[tuple[int, ...], int]
"""A path, and how often the loss calls the module."""

PATHS: list[list[list[Sample]]] = [
    # Of each step the micro-batches of rank 0 and of rank 1; a step may begin with a rank that has none.
    [[((0, 1), 1), ((0, 2), 1)], []],
    [[((2, 1, 0), 1)], [((0, 1, 2), 2), ((3,), 1)]],
    [[], [((3, 3, 0), 1)]],
    [[((0,), 3), ((1, 1), 1)], [((0, 1, 2), 1)]],
    [[((2,), 1)], [((2,), 1)]],
]


def sample_loss(module: Any, sample: tuple[int, Sample]) -> LossSum:
    seed, (path, calls) = sample
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    total = sum(module(x + call, path=path).square().sum() for call in range(calls))
    with torch.no_grad():
        target = module(x, path=(0,)).sum()  # as a teacher would
    return LossSum(total * (1 + 0 * target), 2)


def paths(first: int = 0) -> list[list[list[tuple[int, Sample]]]]:
    """The steps, from another one on, with a seed for every sample."""
    steps = PATHS[first:] + PATHS[:first]
    return [
        [[(100 * i + 10 * rank + j, sample) for j, sample in enumerate(own)] for rank, own in enumerate(step)]
        for i, step in enumerate(steps)
    ]


def fresh_paths() -> Paths:
    torch.manual_seed(0)
    return Paths().double()


def divergent(groups: Groups, layout: Layout, first: int) -> tuple[list[float], dict[str, Tensor]]:
    model = parallelize(fresh_paths(), layout, optimizer=momentum, loss=sample_loss, groups=groups, units=Layer)
    losses = [model.step(step[groups.data.index]).loss for step in paths(first)]
    losses.append(model.evaluate(paths(first)[1][groups.data.index]).loss)
    return losses, model.state_dict()


def plainly_divergent(first: int) -> tuple[list[float], dict[str, Tensor]]:
    module = fresh_paths()
    optimizer = momentum(module.parameters())
    losses = []
    for step in [*paths(first), paths(first)[1]]:
        optimizer.zero_grad()
        found = [sample_loss(module, sample) for own in step for sample in own]
        mean = sum(part.total for part in found) / sum(part.count for part in found)
        losses.append(mean.item())
        if len(losses) <= len(PATHS):
            mean.backward()
            optimizer.step()
    return losses, module.state_dict()


def check(found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-10)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-10, atol=1e-11, msg=partial("{}: {}".format, name))


SLOW = pytest.mark.slow
DIVERGENT = [
    *(pytest.param("dp2/zero3/m2", first) for first in range(5)),
    *(pytest.param("dp2/zero3/m2/prefetch0", first, marks=() if first == 1 else SLOW) for first in range(5)),
    *(pytest.param("dp2/zero3/m3/prefetch2", first, marks=() if first == 3 else SLOW) for first in range(5)),
]


@pytest.mark.parametrize(("text", "first"), DIVERGENT)
def test_ranks_may_take_any_paths_any_number_of_times_in_any_step(gloo_pool: RankPool, text: str, first: int) -> None:
    layout = Layout.parse(text)
    for found in gloo_pool.run(layout.mesh, divergent, layout, first):
        check(found, plainly_divergent(first))


@pytest.mark.parametrize("text", ["dp2/m2", "dp2/zero1/m2", "dp2/zero2/m2"])
def test_parameters_without_a_gradient_keep_their_momentum_as_in_torch(gloo_pool: RankPool, text: str) -> None:
    layout = Layout.parse(text)
    for found in gloo_pool.run(layout.mesh, divergent, layout, 0):
        check(found, plainly_divergent(0))


def thawing(groups: Groups, layout: Layout) -> tuple[list[float], dict[str, Tensor]]:
    module = net()
    module[3].bias.requires_grad_(False)
    model = parallelize(module, layout, optimizer=adamw, loss=mean_square, groups=groups, units=nn.Linear)
    losses = []
    for step in range(4):
        module[0].requires_grad_(step % 2 == 1)
        losses.append(model.step([rows(step).split(4)[groups.data.index]]).loss)
    weights = model.state_dict()
    module[3].bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"3.bias was frozen when the module was divided"):
        model.step([rows(0)])
    return losses, weights


@pytest.mark.parametrize("text", STAGES)
def test_parameters_may_be_frozen_and_thawed_between_steps(gloo_pool: RankPool, text: str) -> None:
    layout = Layout.parse(text)
    module = net()
    module[3].bias.requires_grad_(False)
    optimizer, losses = adamw(module.parameters()), []
    for step in range(4):
        optimizer.zero_grad()
        module[0].requires_grad_(step % 2 == 1)
        value = mean_square(module, rows(step))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    for found in gloo_pool.run(layout.mesh, thawing, layout):
        check(found, (losses, module.state_dict()))


# --- by hand ----------------------------------------------------------------------------------------------------------


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), Layer(7), nn.Linear(7, 3)).to(dtype)


def mean_square(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module(x).square().mean()
    return y


def rows(step: int, count: int = 8) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def by_hand(groups: Groups, layout: Layout) -> tuple[list[float], dict[str, Tensor]]:
    model = parallelize(net(), layout, optimizer=adamw, loss=mean_square, groups=groups, clip=0.3)
    norms = []
    for step in range(2):
        parts = rows(step).split(1)[groups.data.index :: groups.data.size]
        for part in parts:  # four times, whatever m is
            model.backward(mean_square(model, part) / len(parts))
        norms.append(model.update().norm)
    norms.append(model.step(list(rows(2).split(2)[groups.data.index :: groups.data.size])).gradient_norm)
    return norms, model.state_dict()


@pytest.mark.parametrize("text", [*STAGES, "dp4/zero3/shard2", "dp2/zero2/offload"])
def test_several_backward_calls_before_an_update_equal_one_big_batch(gloo_pool: RankPool, text: str) -> None:
    layout = Layout.parse(f"{text}/m2")
    module = net()
    optimizer, norms = adamw(module.parameters()), []
    for step in range(3):
        optimizer.zero_grad()
        mean_square(module, rows(step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.3)))
        optimizer.step()
    assert min(norms) > 0.3  # clipped, and told as it was before
    for found in gloo_pool.run(layout.mesh, by_hand, layout):
        check(found, (norms, module.state_dict()))


# --- gradients that are not finite ------------------------------------------------------------------------------------


def poisoned(groups: Groups, layout: Layout, dtype: torch.dtype, value: float) -> list[Any]:
    model = parallelize(net(torch.float32), layout, optimizer=adamw, loss=mean_square, groups=groups, dtype=dtype)
    mine = [part.to(dtype) for part in rows(0).split(8 // groups.data.size // 2)[groups.data.index :: groups.data.size]]
    mine = mine[: layout.micro_batches]
    assert model.step(mine).fault is None
    before = {state.name: state for state in model.states()}
    scale = model.loss_scale.value

    bad = {"first": True}

    def spoil(gradient: Tensor) -> Tensor:
        first, bad["first"] = bad["first"], False
        return gradient * value if first else gradient  # in the first micro-batch only

    if groups.data.index == 1:
        parameters = {slot.name: p for unit in model._installed.units for slot, p in unit.parameters()}
        hook = parameters["2.up.weight"].register_hook(spoil)
    skipped = model.step(mine)
    if groups.data.index == 1:
        hook.remove()
    same = all(
        torch.equal(state.value, before[state.name].value)
        and all(torch.equal(known, before[state.name].remembered[key]) for key, known in state.remembered.items())
        for state in model.states()
    )
    assert skipped.fault is not None
    scales = (scale, model.loss_scale.value)
    return [skipped.fault.rank, skipped.fault.parameter, same, scales, model.step(mine).fault]


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        *((text, torch.float32) for text in [*STAGES, "dp2/zero2/m2", "dp2/zero3/m2", "dp4/zero3/shard2"]),
        *((text, torch.float16) for text in ["dp2/zero1", "dp2/zero2/m2", "dp2/zero3"]),
    ],
)
def test_a_gradient_that_is_not_finite_on_one_rank_is_named_and_skipped_on_all(
    gloo_pool: RankPool, text: str, dtype: torch.dtype
) -> None:
    layout = Layout.parse(text)
    for value in (math.inf, math.nan):
        for rank, parameter, same, (before, after), fault in gloo_pool.run(layout.mesh, poisoned, layout, dtype, value):
            assert (rank, parameter) == (1, "2.up.weight")
            assert same
            assert after == (before / 2 if dtype is torch.float16 else before)
            assert fault is None


# --- what is held -----------------------------------------------------------------------------------------------------


class Deep(nn.Sequential):
    """Equal blocks that any number of ranks divides."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU()) for _ in range(8)))


def held(groups: Groups, layout: Layout) -> tuple[int, int, int, str]:
    model = parallelize(Deep(), layout, optimizer=adamw, loss=mean_square, groups=groups, units=nn.Sequential)
    blocks = model._installed.hooks.gathering.blocks if model._installed.hooks else ()
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, sum(unit._whole.held_bytes for block in blocks for unit in block.units))

    gathering = model._installed.hooks.gathering  # type: ignore[union-attr]
    for act in ("need", "leave"):
        original = getattr(gathering, act)
        setattr(gathering, act, lambda index, original=original: (look(), original(index), look()))
    x = torch.ones(2, 8, requires_grad=True)
    for _ in range(3):
        model.step([x])
    between = sum(unit._whole.held_bytes for block in blocks for unit in block.units)
    try:
        model.module[0][0].weight.sum()
    except RuntimeError as error:
        refused = str(error)
    with model.whole():
        assert torch.isfinite(model.module[0][0].weight.sum())
    return most, between, model.state_bytes().parameters, refused


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_stage_3_holds_prefetch_and_one_whole_blocks_and_gives_them_back(gloo_pool: RankPool, prefetch: int) -> None:
    layout = Layout.parse(f"dp2/zero3/prefetch{prefetch}")
    block = 8 * 8 * 4
    for most, between, parameters, refused in gloo_pool.run(layout.mesh, held, layout):
        assert most == (prefetch + 1) * block
        assert between == 0
        assert parameters == 8 * block // 2
        assert "0.0.weight is divided among the ranks" in refused
        assert "whole()" in refused


class Mixed(nn.Module):
    """A bfloat16 body with a float32 adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Deep().bfloat16()
        self.adapter = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x.bfloat16()).float() + self.adapter(x)
        return y


def state_bytes(groups: Groups, layout: Layout) -> StateBytes:
    model = parallelize(Mixed(), layout, optimizer=adamw, loss=mean_square, groups=groups, units=nn.Linear)
    model.step([torch.ones(2, 8)])
    return model.state_bytes()


@pytest.mark.parametrize("zero", range(4))
def test_bytes_of_16_bit_blocks_with_32_bit_adapters_equal_the_table(gloo_pool: RankPool, zero: int) -> None:
    layout = Layout.parse(f"dp4/zero{zero}")
    half = model_state_bytes(8 * 64, 4, layout.zero, MIXED_ADAM)
    full = model_state_bytes(64, 4, layout.zero, StateBytes(4, 4, 8))
    both = [one + other for one, other in zip(vars(half).values(), vars(full).values(), strict=True)]
    assert gloo_pool.run(layout.mesh, state_bytes, layout) == [StateBytes(*both)] * 4


# --- what is sent -----------------------------------------------------------------------------------------------------


def sent(groups: Groups, layout: Layout) -> int:
    model = parallelize(Deep(), layout, optimizer=adamw, loss=mean_square, groups=groups, units=nn.Linear)
    batches = [torch.ones(2, 8)] * layout.micro_batches
    model.step(batches)
    groups.ledger.clear()
    model.step(batches)
    return sum(groups.ledger.total(label=label).sent for label in ("gradients", "parameters"))


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("zero", range(4))
def test_a_step_sends_what_the_paper_says(gloo_pool: RankPool, zero: int, m: int) -> None:
    layout = Layout.parse(f"dp4/zero{zero}/m{m}")
    expected = 4 * data_parallel(8 * 64, 4, layout.zero, m)
    assert gloo_pool.run(layout.mesh, sent, layout) == [expected] * 4


# --- dtypes -----------------------------------------------------------------------------------------------------------


def reduced(groups: Groups, layout: Layout, reduce_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """The summed gradient of one weight and the exact one, where ranks contribute 1, 2^-9 and two more."""
    module = nn.Linear(4, 4, bias=False)
    model = parallelize(module, layout, optimizer=adamw, groups=groups, dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    part = torch.tensor([1.0, 2**-9, 2**-9, 2**-9])
    model.backward((model(torch.eye(4, dtype=torch.bfloat16)) * part[groups.data.index]).sum() * groups.data.size)
    if not layout.zero >= 2:
        model._installed.reducing.reduce_rest()
    unit = model._installed.units[0]
    return unit.collect(unit.gradient.owned.float()), part.sum()


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_summed_in_float32_are_nearer_to_the_exact_sum(gloo_pool: RankPool, zero: int) -> None:
    layout = Layout.parse(f"dp4/zero{zero}")
    (half, exact), *_ = gloo_pool.run(layout.mesh, reduced, layout, None)
    (full, _), *_ = gloo_pool.run(layout.mesh, reduced, layout, torch.float32)
    assert torch.allclose(full, exact.expand(16), rtol=1e-6)
    assert not torch.allclose(half, exact.expand(16), rtol=1e-3)


def test_masters_begin_at_the_values_before_rounding() -> None:
    module = nn.Linear(5, 5)
    values = {name: value.detach().clone() for name, value in module.named_parameters()}
    model = parallelize(module, "dp1", optimizer=adamw, loss=mean_square, dtype=torch.bfloat16)
    assert module.weight.dtype is torch.bfloat16
    assert all(torch.equal(state.value, values[state.name]) for state in model.states())


def scaled(groups: Groups, layout: Layout) -> list[float]:
    model: Parallel = parallelize(
        net(torch.float32), layout, optimizer=adamw, loss=mean_square, groups=groups, dtype=torch.float16
    )
    return [model.step([rows(0).half()]).loss for _ in range(8)]


@pytest.mark.parametrize("text", ["dp2/zero1", "dp2/zero3"])
def test_float16_with_a_dynamic_loss_scale_trains(gloo_pool: RankPool, text: str) -> None:
    layout = Layout.parse(text)
    one, other = gloo_pool.run(layout.mesh, scaled, layout)
    assert one == other
    assert one[-1] < 0.8 * one[0]
