"""GELU and its derivative are torch's, in whatever blocks they are computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.model import activation
from meshwright.model.activation import Gelu


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    values = 3 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return values.to(dtype)


def of_torch(x: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """The value, and the gradient of the argument if that of the value is `seed`."""
    x = x.detach().requires_grad_()
    y = F.gelu(x, approximate="tanh")
    return y.detach(), torch.autograd.grad(y, [x], seed)[0]


def differentiated(x: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    gradient = seed.clone()
    return Gelu().differentiate(x, gradient), gradient


@pytest.mark.parametrize("block", [7, 2**17])
@pytest.mark.parametrize("shape", [(3, 5, 8), (1,), (0, 4)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_gelu_and_its_derivative_equal_torchs_and_the_input_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, block: int, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    monkeypatch.setattr(activation, "BLOCK", block)
    x = drawn(*shape, dtype=dtype)
    before = x.clone()
    seed = torch.linspace(-1, 1, x.numel(), dtype=dtype).view_as(x)
    for found, expected in zip(differentiated(x, seed), of_torch(x, seed), strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(Gelu().value(x), Gelu().differentiate(x, seed)), "backward finds what forward computed"
    assert torch.equal(x, before)


def test_in_bfloat16_only_the_results_are_rounded() -> None:
    x = drawn(4000, dtype=torch.bfloat16)
    y, slope = differentiated(x, torch.ones_like(x))
    exact, exact_slope = of_torch(x.double(), torch.ones_like(x, dtype=torch.float64))
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(slope.double(), exact_slope, rtol=2**-8, atol=1e-6)


def test_far_from_zero_it_is_a_straight_line() -> None:
    x = torch.tensor([-1e4, -60.0, 60.0, 1e4])
    y, slope = differentiated(x, torch.ones_like(x))
    assert y.tolist() == [0.0, 0.0, 60.0, 1e4]
    assert slope.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_off_the_cpu_it_is_torchs_own() -> None:
    x = torch.empty(3, 4, device="meta")
    gradient = torch.empty_like(x)
    assert Gelu().value(x).shape == x.shape
    assert Gelu().differentiate(x, gradient).shape == x.shape
