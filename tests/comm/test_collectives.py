"""The collectives of tensor parallelism: what they compute, what flows back, and what is counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.comm.collectives import gather_last_dim, sum_gradient_over_group, sum_over_group
from meshwright.comm.connect import Groups
from meshwright.comm.group import SoloGroup
from meshwright.comm.ledger import Kind
from meshwright.layout.mesh import Mesh
from pool import RankPool


def leaf(index: int) -> Tensor:
    return (torch.arange(6, dtype=torch.float64).view(2, 3) + 10 * index).requires_grad_()


def summed(groups: Groups) -> tuple[Tensor, Tensor, int, int]:
    x = leaf(groups.tensor.index)
    y = sum_over_group(2 * x, groups.tensor)
    forward = groups.ledger.total(Kind.ALL_REDUCE, "tensor", "tensor-forward").calls
    (y * (1 + groups.tensor.index)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad, forward, groups.ledger.total().calls


def test_a_sum_over_the_group_passes_the_gradient_unchanged(pool: RankPool) -> None:
    for rank, (y, gradient, forward, calls) in enumerate(pool.run(Mesh(tensor=2), summed)):
        assert torch.equal(y, (2 * (leaf(0) + leaf(1))).detach())
        assert torch.equal(gradient, torch.full((2, 3), 2.0 * (1 + rank), dtype=torch.float64))
        assert (forward, calls) == (1, 1)


def gradient_summed(groups: Groups) -> tuple[Tensor, Tensor, int, int]:
    x = leaf(groups.tensor.index)
    inner = x * 1
    y = sum_gradient_over_group(inner, groups.tensor)
    # Both branches receive the very same gradient tensor; the sum must not reach the other one.
    ((y + inner) * (1 + groups.tensor.index)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad, groups.ledger.total(label="tensor-backward").calls, groups.ledger.total().calls


def test_a_sum_of_gradients_leaves_values_and_other_branches_alone(pool: RankPool) -> None:
    for rank, (y, gradient, backward, calls) in enumerate(pool.run(Mesh(tensor=2), gradient_summed)):
        assert torch.equal(y, leaf(rank).detach())
        assert torch.equal(gradient, torch.full((2, 3), 3.0 + (1 + rank), dtype=torch.float64))
        assert (backward, calls) == (1, 1)


def gathered(groups: Groups) -> tuple[Tensor, Tensor]:
    x = leaf(groups.tensor.index)
    y = gather_last_dim(x.t(), groups.tensor)
    assert not y.requires_grad
    return y, gather_last_dim(x.detach()[:0], groups.tensor)


def test_a_gather_joins_the_last_dim_in_the_order_of_ranks(pool: RankPool) -> None:
    for y, empty in pool.run(Mesh(tensor=2), gathered):
        assert torch.equal(y, torch.cat([leaf(0).detach().t(), leaf(1).detach().t()], -1))
        assert empty.shape == (0, 6)


def test_a_group_of_one_rank_changes_and_counts_nothing() -> None:
    group = SoloGroup("tensor")
    x = leaf(1)
    y = sum_over_group(sum_gradient_over_group(x, group) * 3, group)
    y.sum().backward()
    assert torch.equal(y, 3 * x)
    assert torch.equal(x.grad, torch.full_like(x, 3.0))  # type: ignore[arg-type]
    assert torch.equal(gather_last_dim(x, group), x.detach())
    assert group.ledger.total().calls == 0


def test_autograd_refuses_to_sum_what_it_has_saved() -> None:
    group = SoloGroup("tensor")
    y = leaf(0).exp()  # saves its result for backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum_over_group(y, group).sum().backward()
