"""Copying between a rank's own memory and memory that another core has just used.

The C library does not fetch what it is about to overwrite; torch's own loop fetches every line, from the other core's
cache if need be. Into 0.8 MB that a peer had read, that was 17 against 100 µs. No thread of torch's takes part: the
ranks of a host have its cores.
"""

from __future__ import annotations

import ctypes

from torch import Tensor


def copy(source: Tensor, target: Tensor) -> None:
    """Copy `source` to `target`: both contiguous, of one size and dtype; autograd does not notice."""
    assert source.numel() == target.numel() and source.dtype is target.dtype
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
