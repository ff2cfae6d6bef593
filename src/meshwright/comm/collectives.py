"""Collectives that autograd understands: the two conjugate operators of tensor parallelism, and a gather for reading.

Megatron-LM (Shoeybi et al., 2019), section 3 and figure 3:

    x --- f --- column-parallel --- gelu --- row-parallel --- g --- y        forward      backward
          |                                                   |         f    identity     all-reduce
          sum_gradient_over_group                sum_over_group         g    all-reduce   identity

This is not where parameters' gradients are reduced: those are summed over the *data* axis by the engine, in bulk.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx, once_differentiable

from meshwright.comm.group import Group


def sum_over_group(x: Tensor, group: Group, label: str = "tensor-forward") -> Tensor:
    """Sum `x` over the group; the gradient passes unchanged (g in Megatron-LM, figure 3).

    Args:
        x: contiguous, any shape, the same on all ranks. It is *overwritten* with the sum, so it must be a fresh result,
            such as a matrix product, that nobody else reads; autograd raises if it saved the old value for backward.
        group: the ranks whose values are summed.
        label: heading in the ledger.
    """
    result: Tensor = _SumOverGroup.apply(x, group, label)  # type: ignore[no-untyped-call]
    return result


def sum_gradient_over_group(x: Tensor, group: Group, label: str = "tensor-backward") -> Tensor:
    """Return `x`; sum its gradient over the group (f in Megatron-LM, figure 3).

    It stands where a replicated tensor enters computation that is split over the group, so that each rank's gradient is
    a partial sum. `ColumnParallelLinear` does the same inside its own backward, where the wait is overlapped.
    """
    result: Tensor = _SumGradientOverGroup.apply(x, group, label)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def gather_last_dim(x: Tensor, group: Group, label: str = "tensor-gather") -> Tensor:
    """Concatenate every rank's `x` (..., c) along its last dim to (..., n c), for reading only: no gradient."""
    source = x.contiguous().view(-1)
    target = source.new_empty(group.size * source.numel())
    group.all_gather(source, target, label=label)
    return target.view(group.size, *x.shape).movedim(0, -2).flatten(-2)


class _Context(FunctionCtx):
    """What both functions remember from forward to backward."""

    group: Group
    label: str


class _SumOverGroup(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: Group, label: str) -> Tensor:
        ctx.mark_dirty(x)
        group.all_reduce(x, label=label)
        return x

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class _SumGradientOverGroup(Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, group: Group, label: str) -> Tensor:
        ctx.group, ctx.label = group, label
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        # A copy: autograd may have handed the same tensor to another branch (y = f(x) + z).
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.group.all_reduce(total, label=ctx.label)
        return total, None, None
