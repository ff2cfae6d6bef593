"""GELU in its tanh form (Hendrycks and Gimpel, 2016), on the CPU with its derivative taken along the way.

torch's operator computes a hyperbolic tangent forward and the same one again backward, and on a CPU these cost more
than all the rest of it. The logistic function says the same for a quarter of the price,

    y     = x s                         u = c (x + 0.044715 x^3), c = 2 sqrt(2 / pi)
    dy/dx = s + x s (1 - s) du/dx       s = 1 / (1 + exp(-u)) = (1 + tanh(u / 2)) / 2
          = s + 3 s (1 - s) (u - 2/3 c x)

and backward is left with one multiplication. The derivative takes the memory that the input would have taken.
"""

from __future__ import annotations

from math import pi, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx, once_differentiable

BLOCK = 2**17
"""Numbers worked on at a time: few enough that what lies between two operations stays in the processor's cache."""

_CUBE = 0.044715
_SCALE = 2 * sqrt(2 / pi)


def gelu(x: Tensor) -> Tensor:
    """`F.gelu(x, approximate="tanh")`; on the CPU it can be differentiated once."""
    if x.device.type != "cpu":
        return F.gelu(x, approximate="tanh")
    graph = torch.is_grad_enabled() and x.requires_grad
    y: Tensor = _Gelu.apply(x, graph)  # type: ignore[no-untyped-call]
    return y


class _Context(FunctionCtx):
    """What the function remembers from forward to backward."""

    saved_tensors: tuple[Tensor, ...]


class _Gelu(Function):
    """`gelu` in float32 (or float64), a block at a time."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, graph: bool) -> Tensor:
        x = x.contiguous()
        accurate = torch.promote_types(x.dtype, torch.float32)
        y = torch.empty_like(x)
        slope = torch.empty_like(x) if graph else None
        for low in range(0, x.numel(), BLOCK):
            part = slice(low, low + BLOCK)
            wide = x.view(-1)[part].to(accurate)
            u = torch.add(wide, wide**3, alpha=_CUBE).mul_(_SCALE)
            s = u.sigmoid()
            torch.mul(wide, s, out=y.view(-1)[part])
            if slope is not None:
                u.sub_(wide, alpha=2 / 3 * _SCALE)
                inner = torch.ops.aten.sigmoid_backward(u, s)  # u s (1 - s) in one pass
                torch.add(s, inner, alpha=3, out=slope.view(-1)[part])
        if slope is not None:
            ctx.save_for_backward(slope)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        return gradient * slope, None
