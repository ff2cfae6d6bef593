"""Attention by blocks of rows: exact in float64, and in bfloat16 about as near to the truth as torch's own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.parallel import attention
from meshwright.parallel.attention import BLOCK, BlockAttention, causal_attention


@dataclass
class Attended:
    """What attention made of queries, keys and values, and their gradient."""

    y: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, y: Tensor, qkv: Tensor) -> Attended:
        seed = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        (gradient,) = torch.autograd.grad(y, [qkv], seed.to(y.dtype))
        return cls(y.detach(), gradient)

    def distances(self, other: Attended) -> list[float]:
        """Relative, of the output and of the gradients of queries, keys and values."""
        mine = [self.y, *self.gradient.unbind(2)]
        theirs = [other.y, *other.gradient.unbind(2)]
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(mine, theirs, strict=True)]


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    values = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return values.to(dtype).requires_grad_()


def of_torch(qkv: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*qkv.transpose(1, 3).unbind(2), is_causal=True).transpose(1, 2)


def by_blocks(qkv: Tensor) -> Tensor:
    return BlockAttention.apply(qkv)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 45])
def test_blocks_of_rows_compute_attention_exactly(length: int) -> None:
    qkv = drawn(2, length, 3, 3, 8)
    found, expected = Attended.of(by_blocks(qkv), qkv), Attended.of(of_torch(qkv), qkv)
    assert found.y.shape == (2, length, 3, 8)
    torch.testing.assert_close(found.y, expected.y, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 5, 3, 2, 4), (1, 5, 3, 1, 4), (2, 5, 3, 1, 4), (1, 5, 3, 2, 4)])
def test_any_number_of_samples_and_heads_will_do_and_the_input_is_left_alone(shape: tuple[int, ...]) -> None:
    qkv = drawn(*shape)
    before = qkv.detach().clone()
    found, expected = Attended.of(by_blocks(qkv), qkv), Attended.of(of_torch(qkv), qkv)
    torch.testing.assert_close(found.y, expected.y, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=0, atol=1e-12)
    assert torch.equal(qkv, before)


def test_a_position_sees_nothing_of_those_after_it() -> None:
    first = drawn(1, 2 * BLOCK, 3, 2, 8).detach()
    second = first.clone()
    second[:, BLOCK + 3 :] += 1
    assert torch.equal(by_blocks(first)[:, : BLOCK + 3], by_blocks(second)[:, : BLOCK + 3])


@pytest.mark.parametrize("length", [64, 300, 600])
def test_in_bfloat16_it_errs_about_as_little_as_torchs_own(length: int) -> None:
    qkv = drawn(2, length, 3, 4, 32, dtype=torch.bfloat16)
    exact = qkv.detach().double().requires_grad_()
    truth = Attended.of(of_torch(exact), exact)
    ours = Attended.of(by_blocks(qkv), qkv).distances(truth)
    torchs = Attended.of(of_torch(qkv), qkv).distances(truth)
    for mine, theirs in zip(ours, torchs, strict=True):
        assert mine < 2.5 * theirs + 1e-4
        assert mine < 2**-7


def test_what_is_kept_for_backward_grows_with_the_length_and_not_with_its_square() -> None:
    sizes = []
    for length in (BLOCK, 4 * BLOCK):
        kept: list[int] = []

        def keep(tensor: Tensor, kept: list[int] = kept) -> Tensor:
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            by_blocks(drawn(1, length, 3, 2, 8))
        sizes.append(sum(kept))
    assert sizes[1] == 4 * sizes[0]


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_are_used_for_bfloat16_where_onednn_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, quick: bool
) -> None:
    monkeypatch.setattr(attention, "onednn_multiplies_bfloat16", lambda: quick)
    qkv = drawn(2, 40, 3, 2, 8, dtype=dtype)
    expected = by_blocks(qkv) if quick and dtype is torch.bfloat16 else of_torch(qkv)
    assert torch.equal(causal_attention(qkv), expected)
