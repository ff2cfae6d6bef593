"""Linear layers whose parameters are cut over the tensor group.

Megatron-LM (Shoeybi et al., 2019), section 3, figures 2 and 3; t is the size of the tensor group:

    x (.., i) ──► ColumnParallelLinear ──► (.., o/t) ──► RowParallelLinear ──► y (.., i)
                  forward: nothing                       forward: sum of y
                  backward: sum of dx                    backward: nothing

An activation function between the two can be given to the second, which then keeps for backward what goes into it and
not what comes out, too. A layer is handed its group; a group of one rank moves nothing. Batches may be empty (b = 0).
The vocabulary is cut in `vocabulary.py`, and normalisation before a column-parallel matrix is in `normed.py`; sequence
parallelism and the gathering of outputs are not here.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx, once_differentiable

from meshwright.comm.group import Group
from meshwright.parallel.parameter import (
    Constant,
    Described,
    Init,
    ParameterSpec,
    Split,
)
from meshwright.parallel.product import input_gradient, leave_weight_gradient, linear


class ColumnParallelLinear(Described):
    """Y = X A^T + b with A's rows (its output features) cut over the group: each rank computes its part of Y.

    Args:
        features: (input, output) features of the whole layer.
        init: of the weight; biases start at 0.
        bias: whether there is one.
        group: the tensor group.
        device, dtype: of the parameters.
        blocks: equal blocks of output features that are each cut by themselves (3 for a fused qkv).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        features: tuple[int, int],
        init: Init,
        bias: bool,
        group: Group,
        device: torch.device,
        dtype: torch.dtype,
        blocks: int = 1,
    ) -> None:
        super().__init__()
        self.group = group
        given, made = features
        split = Split(0, blocks)
        self.declare("weight", ParameterSpec((made, given), init, split), group.size, device, dtype)
        if bias:
            spec = ParameterSpec((made,), Constant(0.0), split, decay=False)
            self.declare("bias", spec, group.size, device, dtype)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """(.., i), equal on all ranks, to this rank's (.., o/t); the gradient of `x` is summed over the group."""
        y: Tensor = _Linear.apply(x, self.weight, self.bias, self.group)  # type: ignore[no-untyped-call]
        return y


class _LinearContext(FunctionCtx):
    """What a product remembers from forward to backward."""

    group: Group
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _Linear(Function):
    """x W^T + b; in backward, f of Megatron-LM's figure 3 over `group`, so that the wait is overlapped."""

    @staticmethod
    def forward(ctx: _LinearContext, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: _LinearContext, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx = dweight = dbias = handle = None
        rows = gradient.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            dx = input_gradient(rows, weight).view(x.shape)
            handle = ctx.group.start_all_reduce(dx, label="tensor-backward")
        # The weight's gradient is computed while the sum above is under way.
        if ctx.needs_input_grad[1]:
            dweight = leave_weight_gradient(weight, rows, x.flatten(0, -2))
        if ctx.needs_input_grad[2]:
            dbias = rows.sum(0)
        if handle is not None:
            handle.wait()
        return dx, dweight, dbias, None


class Activation(Protocol):
    """A function f of every number by itself, cheap enough to be computed again in backward."""

    def value(self, x: Tensor) -> Tensor:
        """Return f(x)."""

    def differentiate(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Return f(x), and multiply `gradient`, of the same shape, by f'(x) in place."""


class RowParallelLinear(Described):
    """Y = f(X) A^T + b with A's columns (its input features) cut over the group: the ranks' products are summed.

    The bias is whole on every rank and added once, after the sum. Arguments as for `ColumnParallelLinear`, and
    `activation` is f (without it, the layer is linear).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        features: tuple[int, int],
        init: Init,
        bias: bool,
        group: Group,
        device: torch.device,
        dtype: torch.dtype,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.activation = activation
        given, made = features
        self.declare("weight", ParameterSpec((made, given), init, Split(1)), group.size, device, dtype)
        if bias:
            spec = ParameterSpec((made,), Constant(0.0), decay=False)
            self.declare("bias", spec, group.size, device, dtype)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """This rank's part (.., i/t) of the input to the whole output (.., o), equal on all ranks."""
        y: Tensor = _SummedLinear.apply(x, self.weight, self.bias, self.group, self.activation)  # type: ignore[no-untyped-call]
        return y


class _SummedContext(FunctionCtx):
    """What a summed product remembers from forward to backward."""

    activation: Activation | None
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _SummedLinear(Function):
    """The sum of f(x) W^T over `group` (g of Megatron-LM's figure 3) + b; backward needs nobody."""

    @staticmethod
    def forward(
        ctx: _SummedContext,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Group,
        activation: Activation | None,
    ) -> Tensor:
        x = x.contiguous()
        ctx.activation = activation
        ctx.save_for_backward(x, weight)
        y = linear(x if activation is None else activation.value(x), weight)
        group.all_reduce(y, label="tensor-forward")
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _SummedContext, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        dx = input_gradient(rows, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        inputs = x
        if ctx.activation is not None:
            inputs = ctx.activation.value(x) if dx is None else ctx.activation.differentiate(x, dx)
        dweight = leave_weight_gradient(weight, rows, inputs.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return dx, dweight, rows.sum(0) if ctx.needs_input_grad[2] else None, None, None
