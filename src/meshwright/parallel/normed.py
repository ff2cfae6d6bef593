"""Layer normalisation, and the column-parallel product of its output, of which only the input is kept for backward.

    x (.., h) ──► normalised (.., h) ──► x W^T + b (.., o/t)      t is the size of the tensor group
        kept           made again in backward

The normalised array is as large as the input, which is kept anyway: normalisation's own derivative needs it. So the
product's backward normalises once more, which costs little beside the product, and waits for nobody: the sum of the
input's gradient over the group is under way meanwhile.

Norms are whole on every rank. Which ranks repeat them is sequence parallelism's question (Korthikanti et al., 2022),
and not here; their recomputation is in section 5 of the same paper.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx, once_differentiable

from meshwright.comm.group import Group
from meshwright.parallel.parameter import Constant, Described, ParameterSpec
from meshwright.parallel.product import input_gradient, leave_weight_gradient, linear
from meshwright.parallel.tensor import ColumnParallelLinear

EPSILON = 1e-5
"""Added to the variance, as torch does by default."""


class LayerNorm(Described):
    """Layer normalisation over h, whole on every rank of the tensor group."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, hidden: int, bias: bool, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.declare("weight", ParameterSpec((hidden,), Constant(1.0), decay=False), 1, device, dtype)
        if bias:
            self.declare("bias", ParameterSpec((hidden,), Constant(0.0), decay=False), 1, device, dtype)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """(.., h) to (.., h)."""
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, EPSILON)


def normed_linear(x: Tensor, norm: LayerNorm, column: ColumnParallelLinear) -> Tensor:
    """`column(norm(x))`, keeping x alone; it can be differentiated once.

    Args:
        x: (.., h), equal on all ranks; its gradient is summed over the group of `column`.
        norm: over h.
        column: from h to o features.

    Returns:
        This rank's (.., o/t).
    """
    y: Tensor = _NormedLinear.apply(x, norm.weight, norm.bias, column.weight, column.bias, column.group)  # type: ignore[no-untyped-call]
    return y


class _Context(FunctionCtx):
    """What the function remembers from forward to backward."""

    group: Group
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _NormedLinear(Function):
    """n W^T + b with n = (x - mean) / deviation * scale + shift; the gradient of n is summed over `group`."""

    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, scale: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor | None, group: Group
    ) -> Tensor:
        normalised, *moments = torch.native_layer_norm(x, x.shape[-1:], scale, shift, EPSILON)
        ctx.group = group
        ctx.save_for_backward(x, *moments, scale, shift, weight)  # type: ignore[arg-type]  # None is saved as None
        return linear(normalised, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _Context, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
        x, mean, rstd, scale, shift, weight = ctx.saved_tensors
        *norm_needs, weight_needs, bias_needs, _ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        dx = dscale = dshift = dweight = dbias = None
        if any(norm_needs):
            dnormalised = input_gradient(rows, weight).view(x.shape)
            handle = ctx.group.start_all_reduce(dnormalised, label="tensor-backward")
        # The weight's gradient is computed while the sum above is under way.
        if weight_needs:
            normalised = torch.native_layer_norm(x, x.shape[-1:], scale, shift, EPSILON)[0]
            dweight = leave_weight_gradient(weight, rows, normalised.flatten(0, -2))
        if bias_needs:
            dbias = rows.sum(0)
        if any(norm_needs):
            handle.wait()
            dx, dscale, dshift = torch.ops.aten.native_layer_norm_backward(
                dnormalised, x, x.shape[-1:], mean, rstd, scale, shift, norm_needs
            )
        return dx, dscale, dshift, dweight, dbias, None
