"""The matrix products equal plain torch's, whichever library computes them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from meshwright.parallel import product
from meshwright.parallel.product import (
    input_gradient,
    leave_weight_gradient,
    linear,
    onednn_is_quicker,
    weight_gradient,
)


@pytest.fixture(params=[True, False], ids=["oneDNN", "torch"])
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch does not offer oneDNN's product")
    monkeypatch.setattr(product, "onednn_is_quicker", lambda: request.param)
    monkeypatch.setattr(product, "WORTHWHILE", 0)


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (0, 4), (5, 0)])
def test_products_equal_plain_torch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((*shape, 24), generator=generator).to(dtype)
    weight, bias = torch.randn(16, 24, generator=generator).to(dtype), torch.randn(16, generator=generator).to(dtype)
    rows = torch.randn((shape[0] * shape[1], 16), generator=generator).to(dtype)
    for found, expected in (
        (linear(x, weight, bias), functional.linear(x, weight, bias)),
        (linear(x, weight), functional.linear(x, weight)),
        (input_gradient(rows, weight), rows.mm(weight)),
        (weight_gradient(rows, x.flatten(0, -2)), rows.t().mm(x.flatten(0, -2))),
    ):
        assert found.shape == expected.shape
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 30])
def test_a_weights_gradient_is_added_in_whatever_blocks_of_rows(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(product, "BLOCK", 8)
    generator = torch.Generator().manual_seed(1)
    rows, inputs = torch.randn(length, 16, generator=generator), torch.randn(length, 24, generator=generator)
    weight = torch.zeros(16, 24, requires_grad=True)
    weight.grad = torch.randn(16, 24, generator=generator)
    expected = weight.grad + rows.t().mm(inputs)
    assert leave_weight_gradient(weight, rows, inputs) is None
    torch.testing.assert_close(weight.grad, expected)


def test_the_choice_is_made_once_and_by_the_processor_alone() -> None:
    assert onednn_is_quicker() is onednn_is_quicker()
    assert onednn_is_quicker.cache_info().currsize == 1
