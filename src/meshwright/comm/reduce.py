"""Combining the ranks' values element by element, always in the order of the ranks: the same bits in every run.

bfloat16 and float16 are summed in float32 and rounded once. Of booleans, sum and maximum are both "any".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.comm.group import Reduction

_BLOCK = 64 * 1024
"""Elements whose partial result stays in a core's own cache."""


def combine(sources: Sequence[Tensor], target: Tensor, reduction: Reduction) -> None:
    """Combine `sources` (1-D, two or more, same size and dtype) into `target`, which may be one of them."""
    dtype = target.dtype
    add = reduction is Reduction.SUM and dtype is not torch.bool
    operation = torch.add if add else torch.maximum
    if len(sources) == 2:  # computed in float32 and rounded once by torch itself
        operation(sources[0], sources[1], out=target)
        return
    wide = torch.float32 if add and dtype in (torch.bfloat16, torch.float16) else dtype
    partial = torch.empty(min(_BLOCK, target.numel()), dtype=wide)
    for start in range(0, target.numel(), _BLOCK):
        parts = [source[start : start + _BLOCK] for source in sources]
        result = partial[: parts[0].numel()]
        if wide is dtype:
            operation(parts[0], parts[1], out=result)
        else:
            operation(result.copy_(parts[0]), parts[1], out=result)
        for part in parts[2:-1]:
            operation(result, part, out=result)
        # Only now may `target` change, which may be any of the sources.
        if wide is dtype:
            operation(result, parts[-1], out=target[start : start + _BLOCK])
        else:
            target[start : start + _BLOCK].copy_(operation(result, parts[-1], out=result))
