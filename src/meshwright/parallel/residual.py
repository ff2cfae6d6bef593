"""ZeRO-R: where the activations that recompute starts from wait for their backward pass (ZeRO, section 6.1).

    Here                    as they are
    Split(group, inner)     each rank of the tensor group keeps 1/t and gathers the rest when it is needed (P_a): the
                            inputs of layers are the same on all of them, so keeping them t times is waste
    Host                    in the host's memory; from a GPU, pinned and copied beside the computation (P_a+cpu)
    File                    in files, for when even that is too small

Stores nest: `Split(tensor, Host())` is P_a+cpu. A store counts what it holds.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor

from meshwright.comm.group import Group


class Kept(Protocol):
    """Something put away."""

    def restore(self) -> Tensor:
        """The tensor as it was given; the store lets go of it. Call once."""


class Store(ABC):
    """Keeps tensors until they are restored; `held` and `peak` are bytes."""

    def __init__(self) -> None:
        self.held = 0
        self.peak = 0

    @abstractmethod
    def keep(self, tensor: Tensor) -> Kept:
        """Put `tensor` away; it must not be changed afterwards."""

    def _count(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)


@final
class Here(Store):
    """Keeps the tensor itself."""

    def keep(self, tensor: Tensor) -> Kept:
        """See `Store`."""
        self._count(tensor.nbytes)
        return _Here(self, tensor)


@final
class _Here:
    def __init__(self, store: Here, tensor: Tensor) -> None:
        self._store = store
        self._tensor = tensor

    def restore(self) -> Tensor:
        self._store._count(-self._tensor.nbytes)
        return self._tensor


@final
class Split(Store):
    """Keeps this rank's 1/t of a tensor that all ranks of `group` keep, in `inner`; padded where t does not divide."""

    def __init__(self, group: Group, inner: Store) -> None:
        super().__init__()
        self._group = group
        self._inner = inner

    def keep(self, tensor: Tensor) -> Kept:
        """See `Store`."""
        flat = tensor.reshape(-1)
        size = -(-flat.numel() // self._group.size)
        own = flat.new_zeros(size)
        part = flat[self._group.index * size : (self._group.index + 1) * size]
        own[: part.numel()] = part
        self._count(own.nbytes)
        return _Split(self, self._group, self._inner.keep(own), tensor.shape)


@final
class _Split:
    def __init__(self, store: Split, group: Group, own: Kept, shape: torch.Size) -> None:
        self._store = store
        self._group = group
        self._own = own
        self._shape = shape

    def restore(self) -> Tensor:
        own = self._own.restore()
        self._store._count(-own.nbytes)
        whole = own.new_empty(own.numel() * self._group.size)
        self._group.all_gather(own, whole, label="checkpoints")
        return whole[: self._shape.numel()].view(self._shape)


@final
class Host(Store):
    """Keeps tensors in the host's memory. On a CPU they are there already, and nothing is copied."""

    def __init__(self) -> None:
        super().__init__()
        self._stream: torch.cuda.Stream | None = None

    def keep(self, tensor: Tensor) -> Kept:
        """See `Store`. From a GPU the copy runs on a stream of its own."""
        self._count(tensor.nbytes)
        if not tensor.is_cuda:
            return _OnHost(self, tensor, tensor.device)
        self._stream = self._stream or torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return _OnHost(self, host, tensor.device, self._stream)


@final
class _OnHost:
    def __init__(
        self, store: Host, host: Tensor, device: torch.device, stream: torch.cuda.Stream | None = None
    ) -> None:
        self._store = store
        self._host = host
        self._device = device
        self._stream = stream

    def restore(self) -> Tensor:
        self._store._count(-self._host.nbytes)
        if self._stream is None:
            return self._host
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return self._host.to(self._device, non_blocking=True)


@final
class File(Store):
    """Keeps tensors in files of a private folder below `folder`, which goes away with the store."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self._folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=folder))
        self._written = 0
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def keep(self, tensor: Tensor) -> Kept:
        """See `Store`. Raises OSError if there is no room."""
        path = self._folder / f"{self._written}"
        self._written += 1
        tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().tofile(path)
        self._count(tensor.nbytes)
        return _InFile(self, path, tensor)


@final
class _InFile:
    def __init__(self, store: File, path: Path, like: Tensor) -> None:
        self._store = store
        self._path = path
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device

    def restore(self) -> Tensor:
        data = np.fromfile(self._path, dtype=np.uint8)
        self._path.unlink()
        self._store._count(-data.nbytes)
        tensor = torch.empty(self._shape, dtype=self._dtype)
        tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(data))
        return tensor.to(self._device)
