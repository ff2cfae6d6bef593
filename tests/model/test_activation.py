"""GELU and its derivative are torch's, in whatever blocks they are computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.model import activation
from meshwright.model.activation import gelu


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    values = 3 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return values.to(dtype).requires_grad_()


def with_gradient(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    seed = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return y, torch.autograd.grad(y, [x], seed)[0]


@pytest.mark.parametrize("block", [7, 2**17])
@pytest.mark.parametrize("shape", [(3, 5, 8), (1,), (0, 4)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_gelu_and_its_derivative_equal_torchs(
    monkeypatch: pytest.MonkeyPatch, block: int, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    monkeypatch.setattr(activation, "BLOCK", block)
    x = drawn(*shape, dtype=dtype)
    for found, expected in zip(with_gradient(gelu(x), x), with_gradient(F.gelu(x, approximate="tanh"), x), strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_in_bfloat16_only_the_results_are_rounded() -> None:
    x = drawn(4000, dtype=torch.bfloat16)
    exact = x.detach().double().requires_grad_()
    y, slope = gelu(x), torch.autograd.grad(gelu(x).sum(), [x])[0]
    exact_slope = torch.autograd.grad(F.gelu(exact, approximate="tanh").sum(), [exact])[0]
    torch.testing.assert_close(y.double(), F.gelu(exact, approximate="tanh"), rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(slope.double(), exact_slope, rtol=2**-8, atol=1e-6)


def test_far_from_zero_it_is_a_straight_line() -> None:
    x = torch.tensor([-1e4, -60.0, 60.0, 1e4], requires_grad=True)
    y, slope = gelu(x), torch.autograd.grad(gelu(x).sum(), [x])[0]
    assert y.tolist() == [0.0, 0.0, 60.0, 1e4]
    assert slope.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_an_input_that_is_not_contiguous_gives_the_same_and_is_left_alone() -> None:
    x = drawn(6, 5, dtype=torch.float64).detach()
    before = x.clone()
    torch.testing.assert_close(gelu(x.t()), gelu(x).t(), rtol=1e-14, atol=1e-14)
    assert torch.equal(x, before)


def test_one_array_of_the_size_of_the_input_is_kept_and_none_without_a_graph() -> None:
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    x = drawn(50, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        gelu(x)
        with torch.no_grad():
            gelu(x)
    assert kept == [50]
