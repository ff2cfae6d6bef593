"""Tensor-parallel linear layers, in float64, against the plain ones of torch on one process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from meshwright.comm.connect import Groups
from meshwright.comm.group import SoloGroup
from meshwright.comm.ledger import Kind
from meshwright.layout.mesh import Mesh
from meshwright.parallel.parameter import Described, Normal, ParameterSpec, Split, cut, join
from meshwright.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from pool import RankPool

CPU = torch.device("cpu")
DOUBLE = torch.float64
SOLO = SoloGroup("tensor")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def fill(layer: Described, values: dict[str, Tensor], index: int, size: int) -> None:
    for name, spec in layer.specs.items():
        layer.register_parameter(name, nn.Parameter(cut(values[name], spec, index, size).clone()))


def gradients(layer: Described) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}


UP = {"weight": drawn(16, 6, seed=1), "bias": drawn(16, seed=2)}
DOWN = {"weight": drawn(6, 16, seed=3), "bias": drawn(6, seed=4)}


@dataclass
class Linears:
    """What two linear layers in a row made of an input."""

    y: Tensor
    dx: Tensor
    up: dict[str, Tensor]
    down: dict[str, Tensor]


def two_linears(groups: Groups, samples: int, bias: bool) -> Linears:
    tensor = groups.tensor
    up = ColumnParallelLinear((6, 16), Normal(1.0), bias, tensor, CPU, DOUBLE)
    down = RowParallelLinear((16, 6), Normal(1.0), bias, tensor, CPU, DOUBLE)
    fill(up, UP, tensor.index, tensor.size)
    fill(down, DOWN, tensor.index, tensor.size)
    x = drawn(samples, 3, 6, seed=5).requires_grad_()
    y = down(up(x).tanh())
    y.backward(drawn(samples, 3, 6, seed=6))
    expected = int(samples > 0 and tensor.size > 1)
    assert groups.ledger.total(Kind.ALL_REDUCE, label="tensor-forward").calls == expected
    assert groups.ledger.total(Kind.ALL_REDUCE, label="tensor-backward").calls == expected
    assert x.grad is not None
    return Linears(y.detach(), x.grad, gradients(up), gradients(down))


def plain_linears(samples: int, bias: bool) -> Linears:
    up, down = nn.Linear(6, 16, bias, dtype=DOUBLE), nn.Linear(16, 6, bias, dtype=DOUBLE)
    up.load_state_dict({name: UP[name] for name in up.state_dict()})
    down.load_state_dict({name: DOWN[name] for name in down.state_dict()})
    x = drawn(samples, 3, 6, seed=5).requires_grad_()
    y = down(up(x).tanh())
    y.backward(drawn(samples, 3, 6, seed=6))
    assert x.grad is not None
    of = [{name: p.grad for name, p in layer.named_parameters() if p.grad is not None} for layer in (up, down)]
    return Linears(y.detach(), x.grad, of[0], of[1])


@pytest.mark.parametrize("samples", [2, 0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_then_row_equals_two_plain_linear_layers(pool: RankPool, size: int, bias: bool, samples: int) -> None:
    expected = plain_linears(samples, bias)
    ranks = pool.run(Mesh(tensor=size), two_linears, samples, bias)
    split = {
        "up weight": ParameterSpec((16, 6), Normal(1.0), Split(0)),
        "up bias": ParameterSpec((16,), Normal(1.0), Split(0)),
        "down weight": ParameterSpec((6, 16), Normal(1.0), Split(1)),
    }
    for rank in ranks:
        # A bias added on every rank before the sum would be there `size` times.
        torch.testing.assert_close(rank.y, expected.y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(rank.dx, expected.dx, rtol=1e-12, atol=1e-12)
        assert torch.equal(rank.y, ranks[0].y), "replicas are equal to the last bit"
        if bias:
            torch.testing.assert_close(rank.down["bias"], expected.down["bias"], rtol=1e-12, atol=1e-12)
    for name, gradient in expected.up.items():
        whole = join([rank.up[name] for rank in ranks], split[f"up {name}"])
        torch.testing.assert_close(whole, gradient, rtol=1e-12, atol=1e-12)
    whole = join([rank.down["weight"] for rank in ranks], split["down weight"])
    torch.testing.assert_close(whole, expected.down["weight"], rtol=1e-12, atol=1e-12)


def test_a_column_parallel_layer_passes_gradcheck_and_skips_what_needs_no_gradient() -> None:
    layer = ColumnParallelLinear((3, 4), Normal(1.0), True, SOLO, CPU, DOUBLE)
    fill(layer, {"weight": drawn(4, 3), "bias": drawn(4)}, 0, 1)
    x = drawn(2, 5, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, layer.weight, layer.bias))
    layer.weight.requires_grad_(False)
    layer(x.detach()).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias is not None
    assert layer.bias.grad is not None


# --- an activation before the row-parallel product -------------------------------------------------------------------


class Square:
    """An activation whose value and slope differ everywhere and from every linear one."""

    def value(self, x: Tensor) -> Tensor:
        return x * x

    def differentiate(self, x: Tensor, gradient: Tensor) -> Tensor:
        gradient.mul_(2 * x)
        return x * x


def activated(groups: Groups, samples: int, bias: bool) -> Linears:
    tensor = groups.tensor
    up = ColumnParallelLinear((6, 16), Normal(1.0), bias, tensor, CPU, DOUBLE)
    down = RowParallelLinear((16, 6), Normal(1.0), bias, tensor, CPU, DOUBLE, Square())
    fill(up, UP, tensor.index, tensor.size)
    fill(down, DOWN, tensor.index, tensor.size)
    x = drawn(samples, 3, 6, seed=5).requires_grad_()
    y = down(up(x))
    y.backward(drawn(samples, 3, 6, seed=6))
    assert x.grad is not None
    return Linears(y.detach(), x.grad, gradients(up), gradients(down))


@pytest.mark.parametrize("samples", [2, 0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_an_activation_in_the_layer_equals_one_before_it(pool: RankPool, size: int, bias: bool, samples: int) -> None:
    x = drawn(samples, 3, 6, seed=5).requires_grad_()
    weights = {name: value.clone().requires_grad_() for name, value in (("up", UP["weight"]), ("down", DOWN["weight"]))}
    inner = nn.functional.linear(x, weights["up"], UP["bias"] if bias else None)
    y = nn.functional.linear(inner.square(), weights["down"], DOWN["bias"] if bias else None)
    y.backward(drawn(samples, 3, 6, seed=6))
    ranks = pool.run(Mesh(tensor=size), activated, samples, bias)
    for rank in ranks:
        torch.testing.assert_close(rank.y, y.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(rank.dx, x.grad, rtol=1e-12, atol=1e-12)
    for name, dim in (("up", 0), ("down", 1)):
        whole = torch.cat([getattr(rank, name)["weight"] for rank in ranks], dim)
        torch.testing.assert_close(whole, weights[name].grad, rtol=1e-12, atol=1e-12)


def test_with_an_activation_its_argument_alone_is_kept_and_left_alone() -> None:
    layer = RowParallelLinear((16, 6), Normal(1.0), True, SOLO, CPU, DOUBLE, Square())
    fill(layer, DOWN, 0, 1)
    x = drawn(2, 3, 16).requires_grad_()
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x)
        with torch.no_grad():
            layer(x)
    assert sorted(kept) == sorted([x.data_ptr(), layer.weight.data_ptr()])
    before = x.detach().clone()
    y.sum().backward()
    assert torch.equal(x, before)


def test_with_an_activation_what_needs_no_gradient_is_skipped() -> None:
    layer = RowParallelLinear((16, 6), Normal(1.0), True, SOLO, CPU, DOUBLE, Square())
    fill(layer, DOWN, 0, 1)
    layer(drawn(2, 16)).sum().backward()
    expected = drawn(2, 16).square().sum(0).expand(6, 16)
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-12, atol=1e-12)
    layer.weight.requires_grad_(False)
    x = drawn(2, 16).requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() * DOWN["weight"].sum(0), rtol=1e-12, atol=1e-12)


# --- where a weight's gradient goes ----------------------------------------------------------------------------------


def layers_of(kind: str) -> tuple[Described, Tensor]:
    layer: Described
    if kind == "column":
        layer = ColumnParallelLinear((6, 16), Normal(1.0), True, SOLO, CPU, DOUBLE)
        fill(layer, UP, 0, 1)
    else:
        layer = RowParallelLinear((16, 6), Normal(1.0), True, SOLO, CPU, DOUBLE)
        fill(layer, DOWN, 0, 1)
    return layer, drawn(2, 3, 6 if kind == "column" else 16, seed=5)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_gradient_that_is_there_already_is_added_to_where_it_lies(kind: str) -> None:
    layer, x = layers_of(kind)
    layer(x).square().sum().backward()
    expected = gradients(layer)
    layer.zero_grad()
    assert layer.weight.grad is None
    flat = drawn(layer.weight.numel(), seed=8)
    before = flat.clone().view_as(layer.weight)
    layer.weight.grad = flat.view_as(layer.weight)
    for times in (1, 2):  # two micro-batches
        layer(x).square().sum().backward()
        assert layer.weight.grad.data_ptr() == flat.data_ptr()
        torch.testing.assert_close(flat.view_as(before), before + times * expected["weight"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.bias.grad, 2 * expected["bias"], rtol=1e-12, atol=1e-12)


def test_a_weight_that_two_layers_share_gets_both_gradients_with_and_without_one_before() -> None:
    found = []
    for given in (False, True):
        (first, x), (second, _) = layers_of("column"), layers_of("column")
        second.weight = first.weight
        if given:
            first.weight.grad = torch.zeros_like(first.weight)
        (first(x).square().sum() + second(2 * x).square().sum()).backward()
        assert first.weight.grad is not None
        found.append(first.weight.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def test_without_a_gradient_there_autograd_returns_it_to_whoever_asks() -> None:
    layer, x = layers_of("column")
    (found,) = torch.autograd.grad(layer(x).square().sum(), [layer.weight])
    assert layer.weight.grad is None
    layer(x).square().sum().backward()
    assert torch.equal(found, layer.weight.grad)


def test_a_weight_that_is_computed_from_others_passes_its_gradient_on() -> None:
    layer, x = layers_of("column")
    origin = layer.weight.detach().clone().requires_grad_()
    layer(x).sum().backward()
    expected = layer.weight.grad
    del layer.weight
    layer.weight = 2 * origin  # type: ignore[assignment]
    layer(x / 2).sum().backward()
    torch.testing.assert_close(origin.grad, expected, rtol=1e-12, atol=1e-12)
