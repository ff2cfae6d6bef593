"""GELU in its tanh form (Hendrycks and Gimpel, 2016), and on the CPU its derivative from the same logistic function.

torch's operator computes a hyperbolic tangent forward and the same one again backward, and on a CPU these cost more
than all the rest of it. The logistic function says the same for a quarter of the price:

    y     = x s                         u = c (x + 0.044715 x^3), c = 2 sqrt(2 / pi)
    dy/dx = s + x s (1 - s) du/dx       s = 1 / (1 + exp(-u)) = (1 + tanh(u / 2)) / 2
          = s + 3 s (1 - s) (u - 2/3 c x)

So cheap that backward computes both once more, and between the two passes only x is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import pi, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 2**17
"""Numbers worked on at a time: few enough that what lies between two operations stays in the processor's cache."""

_CUBE = 0.044715
_SCALE = 2 * sqrt(2 / pi)


class Gelu:
    """`F.gelu(x, approximate="tanh")` of contiguous arrays, and its derivative; autograd sees neither."""

    def value(self, x: Tensor) -> Tensor:
        """GELU of every element."""
        if x.device.type != "cpu":
            return F.gelu(x, approximate="tanh")
        y = torch.empty_like(x)
        for part, wide in _blocks(x):
            torch.mul(wide, _argument(wide).sigmoid_(), out=y.view(-1)[part])
        return y

    def differentiate(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Return GELU of every element, and multiply `gradient`, of the same shape, by the slope there, in place."""
        if x.device.type != "cpu":
            torch.ops.aten.gelu_backward.grad_input(gradient, x, approximate="tanh", grad_input=gradient)
            return F.gelu(x, approximate="tanh")
        y = torch.empty_like(x)
        for part, wide in _blocks(x):
            u = _argument(wide)
            s = u.sigmoid()
            torch.mul(wide, s, out=y.view(-1)[part])
            u.sub_(wide, alpha=2 / 3 * _SCALE)
            inner = torch.ops.aten.sigmoid_backward(u, s)  # u s (1 - s) in one pass
            gradient.view(-1)[part].mul_(s.add_(inner, alpha=3))
        return y


def _blocks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Where in the flat array a block lies, and its numbers in float32 (or float64)."""
    accurate = torch.promote_types(x.dtype, torch.float32)
    flat = x.view(-1)
    for low in range(0, len(flat), BLOCK):
        part = slice(low, low + BLOCK)
        yield part, flat[part].to(accurate)


def _argument(x: Tensor) -> Tensor:
    """The u of the equations above."""
    return torch.add(x, x**3, alpha=_CUBE).mul_(_SCALE)
