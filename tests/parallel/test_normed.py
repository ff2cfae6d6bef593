"""Layer normalisation with the product after it, in float64, against torch's own two layers on one process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.comm.connect import Groups
from meshwright.comm.group import Group, SoloGroup
from meshwright.comm.ledger import Kind
from meshwright.layout.mesh import Mesh
from meshwright.parallel.normed import LayerNorm, normed_linear
from meshwright.parallel.parameter import Described, Normal, ParameterSpec, Split, cut, join
from meshwright.parallel.tensor import ColumnParallelLinear
from pool import RankPool

CPU = torch.device("cpu")
DOUBLE = torch.float64
SOLO = SoloGroup("tensor")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


VALUES = {
    "norm": {"weight": drawn(6, seed=1), "bias": drawn(6, seed=2)},
    "column": {"weight": drawn(16, 6, seed=3), "bias": drawn(16, seed=4)},
}


def filled(layer: Described, values: dict[str, Tensor], group: Group) -> None:
    for name, spec in layer.specs.items():
        value = cut(values[name], spec, group.index, group.size if spec.split else 1)
        layer.register_parameter(name, nn.Parameter(value.clone()))


def layers(group: Group, bias: bool) -> tuple[LayerNorm, ColumnParallelLinear]:
    norm = LayerNorm(6, bias, CPU, DOUBLE)
    column = ColumnParallelLinear((6, 16), Normal(1.0), bias, group, CPU, DOUBLE)
    filled(norm, VALUES["norm"], group)
    filled(column, VALUES["column"], group)
    return norm, column


@dataclass
class Passed:
    """What a norm and a product made of an input."""

    y: Tensor
    dx: Tensor
    norm: dict[str, Tensor]
    column: dict[str, Tensor]


def passed(y: Tensor, x: Tensor, norm: nn.Module, column: nn.Module) -> Passed:
    assert x.grad is not None
    of = [{name: p.grad for name, p in layer.named_parameters() if p.grad is not None} for layer in (norm, column)]
    return Passed(y.detach(), x.grad, of[0], of[1])


def on_a_rank(groups: Groups, samples: int, bias: bool) -> Passed:
    tensor = groups.tensor
    norm, column = layers(tensor, bias)
    x = drawn(samples, 3, 6, seed=5).requires_grad_()
    y = normed_linear(x, norm, column)
    width = 16 // tensor.size
    y.backward(drawn(samples, 3, 16, seed=6)[..., tensor.index * width : (tensor.index + 1) * width])
    tally = groups.ledger.total(Kind.ALL_REDUCE, label="tensor-backward")
    assert tally.calls == int(samples > 0 and tensor.size > 1)
    assert groups.ledger.total().calls == tally.calls, "and nothing else is sent"
    return passed(y, x, norm, column)


def plain(samples: int, bias: bool) -> Passed:
    norm, column = nn.LayerNorm(6, bias=bias, dtype=DOUBLE), nn.Linear(6, 16, bias, dtype=DOUBLE)
    for name, layer in (("norm", norm), ("column", column)):
        layer.load_state_dict({key: VALUES[name][key] for key in layer.state_dict()})
    x = drawn(samples, 3, 6, seed=5).requires_grad_()
    y = column(norm(x))
    y.backward(drawn(samples, 3, 16, seed=6))
    return passed(y, x, norm, column)


@pytest.mark.parametrize("samples", [2, 0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_it_equals_torchs_two_layers_on_any_tensor_group(pool: RankPool, size: int, bias: bool, samples: int) -> None:
    expected = plain(samples, bias)
    ranks = pool.run(Mesh(tensor=size), on_a_rank, samples, bias)
    torch.testing.assert_close(torch.cat([rank.y for rank in ranks], -1), expected.y, rtol=1e-12, atol=1e-12)
    for rank in ranks:
        torch.testing.assert_close(rank.dx, expected.dx, rtol=1e-12, atol=1e-12)
        assert rank.norm.keys() == expected.norm.keys()
        for name, gradient in expected.norm.items():
            torch.testing.assert_close(rank.norm[name], gradient, rtol=1e-12, atol=1e-12)
    for name, gradient in expected.column.items():
        spec = ParameterSpec(tuple(gradient.shape), Normal(1.0), Split(0))
        whole = join([rank.column[name] for rank in ranks], spec)
        torch.testing.assert_close(whole, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_every_dtype_it_has_the_bits_of_the_two_layers_one_by_one(dtype: torch.dtype) -> None:
    norm, column = (layer.to(dtype) for layer in layers(SOLO, True))
    found = []
    for together in (True, False):
        x = drawn(4, 3, 6, seed=5).to(dtype).requires_grad_()
        norm.zero_grad()
        column.zero_grad()
        y = normed_linear(x, norm, column) if together else column(norm(x))
        y.backward(drawn(4, 3, 16, seed=6).to(dtype))
        found.append(passed(y, x, norm, column))
    assert torch.equal(found[0].y, found[1].y)
    assert torch.equal(found[0].dx, found[1].dx)
    for name in ("weight", "bias"):
        assert torch.equal(found[0].norm[name], found[1].norm[name])
        assert torch.equal(found[0].column[name], found[1].column[name])


@pytest.mark.parametrize("frozen", ["norm", "column", "x"])
def test_what_needs_no_gradient_gets_none_and_the_rest_is_unchanged(frozen: str) -> None:
    norm, column = layers(SOLO, True)
    norm.requires_grad_(frozen != "norm")
    column.requires_grad_(frozen != "column")
    x = drawn(2, 3, 6, seed=5).requires_grad_(frozen != "x")
    normed_linear(x, norm, column).backward(drawn(2, 3, 16, seed=6))
    expected = plain(2, True)
    assert x.grad is None if frozen == "x" else torch.allclose(x.grad, expected.dx, rtol=1e-12, atol=1e-12)
    for name, layer, gradients in (("norm", norm, expected.norm), ("column", column, expected.column)):
        for key, parameter in layer.named_parameters():
            if name == frozen:
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-12, atol=1e-12)


def test_a_gradient_that_is_there_already_is_added_to_where_it_lies() -> None:
    norm, column = layers(SOLO, True)
    flat = drawn(column.weight.numel(), seed=8)
    before = flat.clone().view_as(column.weight)
    column.weight.grad = flat.view_as(column.weight)
    normed_linear(drawn(2, 3, 6, seed=5), norm, column).backward(drawn(2, 3, 16, seed=6))
    assert column.weight.grad.data_ptr() == flat.data_ptr()
    expected = before + plain(2, True).column["weight"]
    torch.testing.assert_close(flat.view_as(before), expected, rtol=1e-12, atol=1e-12)


def test_the_input_alone_is_kept_and_two_numbers_for_each_vector_and_nothing_without_a_graph() -> None:
    norm, column = layers(SOLO, True)
    x = drawn(7, 5, 6).requires_grad_()
    there = {tensor.data_ptr() for tensor in (x, *norm.parameters(), *column.parameters())}
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in there:
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        normed_linear(x, norm, column)
        assert kept == [35, 35]
        with torch.no_grad():
            normed_linear(x, norm, column)
    assert kept == [35, 35]


def test_alone_the_norm_is_torchs() -> None:
    norm, _ = layers(SOLO, True)
    x = drawn(2, 3, 6)
    assert torch.equal(norm(x), F.layer_norm(x, (6,), VALUES["norm"]["weight"], VALUES["norm"]["bias"]))
