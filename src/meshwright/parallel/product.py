"""The three matrix products of a linear layer, on whichever of torch's libraries is quick on this processor.

torch's CPU builds multiply float32 matrices with MKL, which on AMD's processors does not use their 512-bit units;
oneDNN, which is in the same builds, does. On a Zen 5 core a GPT's training step took 1.7 times as long with MKL. In
every other case (other processors, other dtypes, GPUs) this is plain torch. The choice depends on the processor's
name alone and never on a timing, so the same machine always computes the same bits.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

WORTHWHILE = 2**21
"""Multiplications from which oneDNN is asked: it prepares itself anew for every shape, and wakes threads for any."""

BLOCK = 256
"""Rows of which oneDNN adds up a weight's gradient at a time. It copies them in the order it likes: all logits of a
micro-batch, otherwise, for the largest matrix of a small model. No slower, and quicker where the copy was so large."""


@cache
def onednn_is_quicker() -> bool:
    """Whether float32 products on this machine's CPU should go to oneDNN."""
    try:
        name = Path("/proc/cpuinfo").read_text().split("vendor_id", 1)[-1].split("\n", 1)[0]
    except OSError:
        return False
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    offered = available and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return "AuthenticAMD" in name and wide and offered


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b for (.., i) and (o, i), as `F.linear`; without a graph."""
    if _to_onednn(x, weight):
        # torch gives this operation no public name; compiled models use it.
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return functional.linear(x, weight, bias)


def input_gradient(rows: Tensor, weight: Tensor) -> Tensor:
    """Return g W for (n, o) and (o, i)."""
    return linear(rows, weight.t()) if _to_onednn(rows, weight.t()) else rows.mm(weight)


def weight_gradient(rows: Tensor, inputs: Tensor) -> Tensor:
    """Return g^T x for (n, o) and (n, i)."""
    return linear(rows.t(), inputs.t()) if _to_onednn(rows.t(), inputs.t()) else rows.t().mm(inputs)


def leave_weight_gradient(weight: Tensor, rows: Tensor, inputs: Tensor) -> Tensor | None:
    """Leave g^T x where the gradient of `weight` belongs: add it to `weight.grad`, or return it for autograd to add.

    Where a gradient is there already, as in an engine whose gradients lie in one flat buffer, adding to it here saves
    an array as large as the weight, and in 16 bits the sum is taken in float32 before it is rounded. Autograd is then
    given None: it adds nothing itself, calls no hooks of the parameter, and `torch.autograd.grad` would find nothing.
    Whoever wants either calls backward while `weight.grad` is None, as torch does everywhere by default.
    """
    total = weight.grad if weight.is_leaf else None
    if total is None or total.dtype != weight.dtype:
        return weight_gradient(rows, inputs)
    if _to_onednn(rows.t(), inputs.t()):
        for some, theirs in zip(torch.split(rows, BLOCK), torch.split(inputs, BLOCK), strict=True):
            total.add_(weight_gradient(some, theirs))
    else:
        total.addmm_(rows.t(), inputs)
    return None


def _to_onednn(x: Tensor, weight: Tensor) -> bool:
    if x.dtype is not torch.float32 or x.device.type != "cpu" or not onednn_is_quicker():
        return False
    return x.numel() > 0 and x.numel() * weight.shape[0] >= WORTHWHILE
