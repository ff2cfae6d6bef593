"""Causal self-attention, by blocks of rows where that is quicker than what torch offers.

For 16-bit numbers on a CPU torch's fused attention takes three times as long as the matrix products it consists of,
which oneDNN computes at full speed. So there it is written out, without ever holding s x s probabilities: a block of
rows at a time, each with the columns that causality leaves it, and computed again in backward (FlashAttention; Dao et
al., 2022, section 3.1, with blocks as wide as a row, so that an ordinary softmax will do).

            keys
          ┌──┐ · · ·      S = q k^T / sqrt(d)    P = softmax(S)      y = P v
  queries ├──┴──┐ · ·     dP = dy v^T            dS = P (dP - sum over the row of P dP)
          ├─────┴──┐ ·    dq = dS k / sqrt(d)    dk = dS^T q / sqrt(d)     dv = P^T dy
          └────────┴──┘   a block of rows reads the keys up to its last row; dk and dv are sums over the blocks

Everywhere else this is `F.scaled_dot_product_attention`. Dropout of probabilities is not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx, once_differentiable

BLOCK = 128
"""Rows of a block: enough for products at full speed; more would waste more of what causality leaves out."""


def causal_attention(qkv: Tensor) -> Tensor:
    """Let every position attend to itself and to those before it, in each head by itself.

    Args:
        qkv: (b, s, 3, a, d), the queries, keys and values of a heads.

    Returns:
        (b, s, a, d).
    """
    if qkv.dtype is torch.bfloat16 and qkv.device.type == "cpu" and onednn_multiplies_bfloat16():
        y: Tensor = BlockAttention.apply(qkv)  # type: ignore[no-untyped-call]
        return y
    # Unbound along this dim, the three gradients are stacked into qkv's own order: one copy in backward, not two.
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


@cache
def onednn_multiplies_bfloat16() -> bool:
    """Whether torch hands bfloat16 products to oneDNN on this processor; without it they are very slow."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _Context(FunctionCtx):
    """What attention remembers from forward to backward."""

    saved_tensors: tuple[Tensor, ...]


class BlockAttention(Function):
    """`causal_attention` by blocks of rows, in any floating dtype; the letters are those of the drawing above."""

    @staticmethod
    def forward(ctx: _Context, qkv: Tensor) -> Tensor:
        """(b, s, 3, a, d) to (b, s, a, d)."""
        b, s, _, a, d = qkv.shape
        q, k, v = (_heads(part) for part in qkv.unbind(2))
        q = q * d**-0.5
        y = torch.empty_like(q)
        for rows in _blocks(s):
            torch.bmm(_probabilities(q, k, rows), v[:, : rows.stop], out=y[:, rows])
        ctx.save_for_backward(q, k, v)
        return y.view(b, a, s, d).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> Tensor:
        """(b, s, a, d) to (b, s, 3, a, d)."""
        q, k, v = ctx.saved_tensors
        b, s, a, d = gradient.shape
        dy = _heads(gradient)
        dq, dk, dv = torch.empty((3, *q.shape), dtype=q.dtype, device=q.device)
        for rows in reversed(list(_blocks(s))):  # the last block reads all keys, so it can write what the others add to
            seen = slice(rows.stop)
            p = _probabilities(q, k, rows)
            dp = torch.bmm(dy[:, rows], v[:, seen].transpose(1, 2))
            # The derivative of torch's own softmax; it has no public name.
            ds = torch.ops.aten._softmax_backward_data(dp, p, -1, dp.dtype)
            torch.bmm(ds, k[:, seen], out=dq[:, rows])
            for total, left, right in ((dk, ds, q), (dv, p, dy)):
                if rows.stop == s:
                    torch.bmm(left.transpose(1, 2), right[:, rows], out=total)
                else:
                    total[:, seen] += torch.bmm(left.transpose(1, 2), right[:, rows])
        dq *= d**-0.5
        return torch.stack([part.view(b, a, s, d).transpose(1, 2) for part in (dq, dk, dv)], 2)


def _heads(part: Tensor) -> Tensor:
    """(b, s, a, d) to (b a, s, d), contiguous."""
    return part.transpose(1, 2).flatten(0, 1).contiguous()


def _blocks(length: int) -> Iterator[slice]:
    return (slice(low, min(low + BLOCK, length)) for low in range(0, length, BLOCK))


def _probabilities(q: Tensor, k: Tensor, rows: slice) -> Tensor:
    """P (b a, rows, keys up to the last of them)."""
    scores = torch.bmm(q[:, rows], k[:, : rows.stop].transpose(1, 2))
    scores[:, :, rows] += _future(rows.stop - rows.start, scores.dtype, scores.device)
    return scores.softmax(-1)


def _future(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(size, size): minus infinity where the key comes after the query, else 0."""
    return torch.full((size, size), -torch.inf, dtype=dtype, device=device).triu_(1)
