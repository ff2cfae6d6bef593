"""Whatever a module is made of and does, `parallelize` trains it like plain torch, under every stage and division."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from any_module import ZOO, cnn
from torch import Tensor, nn

from meshwright import parallelize
from meshwright.comm.connect import Groups
from meshwright.layout.layout import Layout
from pool import RankPool

STEPS = 3
Found = tuple[list[float], dict[str, Tensor]]


def make(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = ZOO[name]().double()
    for child in module.modules():
        if child is getattr(module, "single", None):
            child.float()  # a module with two dtypes
    return module


def batch(step: int) -> Tensor:
    """Four samples; the second half is another rank's."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def loss(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module(x).square().mean()
    return y


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


def plain(name: str) -> Found:
    module = make(name)
    optimizer = adamw([parameter for parameter in module.parameters() if parameter.requires_grad])
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = sum(loss(module, half) for half in batch(step).split(2)) / 2
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, module.state_dict()


def ours(groups: Groups, layout: Layout, name: str, divisions: list[Any]) -> list[Found]:
    found = []
    for units in divisions:
        model = parallelize(make(name, groups.rank), layout, optimizer=adamw, loss=loss, groups=groups, units=units)
        losses = []
        for step in range(STEPS):
            halves = batch(step).split(2)
            mine = [halves[groups.data.index]] if groups.data.size == 2 else list(halves)
            losses.append(model.step(mine).loss)
        found.append((losses, model.state_dict()))
    return found


def close(found: Found, expected: Found, what: str, tolerance: float = 1e-10) -> None:
    assert found[0] == pytest.approx(expected[0], rel=tolerance), what
    assert found[1].keys() == expected[1].keys()
    for key, value in expected[1].items():
        exact = tolerance if value.dtype == torch.float64 else 1e-5
        message = partial("{} {}: {}".format, what, key)
        torch.testing.assert_close(found[1][key], value, rtol=exact, atol=exact, msg=message)


def every_module_with_parameters(name: str, module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


DIVISIONS: list[Any] = [None, (nn.Linear, nn.LSTM), every_module_with_parameters]


@pytest.mark.parametrize("name", ZOO)
def test_modules_of_all_kinds_train_alike_however_they_are_divided(gloo_pool: RankPool, name: str) -> None:
    layout = Layout.parse("dp2/zero3")
    expected = plain(name)
    for found in gloo_pool.run(layout.mesh, ours, layout, name, DIVISIONS):
        for units, one in zip(DIVISIONS, found, strict=True):
            close(one, expected, f"units={units}")


EVERY_STAGE = [
    # A checkpoint that reenters brings gradients in several portions, which matters where they are reduced early.
    pytest.param(text, name, marks=() if name == "reentrant" and text in ("dp2", "dp2/zero2") else pytest.mark.slow)
    for text in ["dp2", "dp2/zero1", "dp2/zero2", "dp2/zero3/prefetch0", "dp2/zero3/prefetch2"]
    for name in ZOO
]


@pytest.mark.parametrize(("text", "name"), EVERY_STAGE)
def test_modules_of_all_kinds_train_alike_under_every_stage(gloo_pool: RankPool, text: str, name: str) -> None:
    layout = Layout.parse(text)
    for found in gloo_pool.run(layout.mesh, ours, layout, name, [1, 60, 10**9]):
        for one in found:
            close(one, plain(name), text)


@pytest.mark.parametrize("text", [pytest.param("dp2/zero1", marks=pytest.mark.slow), "dp2/zero3"])
def test_modules_of_all_kinds_train_alike_over_shared_memory(pool: RankPool, text: str) -> None:
    layout = Layout.parse(text)
    for found in pool.run(layout.mesh, all_of_the_zoo, layout):
        for name, one in found.items():
            close(one, plain(name), name)


def all_of_the_zoo(groups: Groups, layout: Layout) -> dict[str, Found]:
    return {name: ours(groups, layout, name, [None])[0] for name in ZOO}


# --- convolutions and BatchNorm ---------------------------------------------------------------------------------------


def images(step: int) -> Tensor:
    return torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def convolved(groups: Groups, layout: Layout) -> tuple[Found, Tensor]:
    torch.manual_seed(groups.rank)
    model = parallelize(cnn().double(), layout, optimizer=adamw, loss=loss, groups=groups)
    model.module[1].norm.eval()  # fine-tuned with the statistics it has
    losses = [model.step([images(step).split(2)[groups.data.index]]).loss for step in range(STEPS)]
    before = model.state_dict()
    model.evaluate([images(9)])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.module[1].norm.training
    assert model.module[2].norm.training
    return (losses, before), model.state_dict()["2.norm.running_mean"]


def plainly_convolved() -> Found:
    """Each half sees its own statistics, and the running ones are the mean of the halves'."""
    torch.manual_seed(0)
    module = cnn().double()
    module[1].norm.eval()
    optimizer = adamw(module.parameters())
    norm, losses = module[2].norm, []
    for step in range(STEPS):
        optimizer.zero_grad()
        before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        seen, total = [], 0.0
        for half in images(step).split(2):
            norm.load_state_dict(before, strict=False)
            value = loss(module, half) / 2
            value.backward()
            total += value.item()
            seen.append({name: buffer.clone() for name, buffer in norm.named_buffers()})
        for name, buffer in norm.named_buffers():
            buffer.copy_((seen[0][name] + seen[1][name]) / 2)
        optimizer.step()
        losses.append(total)
    return losses, module.state_dict()


@pytest.mark.parametrize("text", ["dp2", "dp2/zero2", "dp2/zero3"])
def test_batch_norm_and_in_place_operations_train_alike_and_statistics_are_those_of_all_ranks(
    gloo_pool: RankPool, text: str
) -> None:
    layout = Layout.parse(text)
    (first, mean), (second, other_mean) = gloo_pool.run(layout.mesh, convolved, layout)
    close(first, plainly_convolved(), text)
    close(second, first, text)
    assert torch.equal(mean, other_mean)


# --- autocast, the graph's memory -------------------------------------------------------------------------------------


def autocast(groups: Groups, layout: Layout) -> list[float]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    model = parallelize(module, layout, optimizer=adamw, loss=loss, groups=groups, units=nn.Linear)
    with torch.autocast("cpu", torch.bfloat16):  # around all steps: what it has converted must not outlive an update
        return [model.step([batch(0)[groups.data.index :: groups.data.size].float()]).loss for _ in range(12)]


@pytest.mark.parametrize("text", ["dp2", "dp2/zero3"])
def test_autocast_around_the_steps_sees_updated_parameters(gloo_pool: RankPool, text: str) -> None:
    layout = Layout.parse(text)
    losses, _ = gloo_pool.run(layout.mesh, autocast, layout)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    optimizer, expected = adamw(module.parameters()), []
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = sum(loss(module, batch(0)[part::2].float()) for part in range(2)) / 2
        value.backward()
        optimizer.step()
        expected.append(value.item())
    assert losses == pytest.approx(expected, rel=2e-2)
    assert losses[-1] < 0.9 * losses[0]


def graphs_left(groups: Groups, layout: Layout) -> list[int]:
    """Tensors alive after steps, and after forward passes that nobody went back through, without garbage collection."""
    model = parallelize(make("boxes"), layout, optimizer=adamw, loss=loss, groups=groups, units=nn.Linear)
    mine, counts = batch(0).split(2)[groups.data.index], []
    gc.collect()
    gc.disable()
    try:
        for number in range(6):
            model.step([mine])
            model(mine)
            if number % 2:
                counts.append(sum(isinstance(thing, Tensor) for thing in gc.get_objects()))
    finally:
        gc.enable()
    return counts


def test_hooks_keep_no_graph_alive(gloo_pool: RankPool) -> None:
    layout = Layout.parse("dp2/zero3")
    for counts in gloo_pool.run(layout.mesh, graphs_left, layout):
        assert counts[0] == counts[1] == counts[2]
