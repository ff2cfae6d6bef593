"""ZeRO-R: where the activations that recompute starts from wait for their backward pass (ZeRO, section 6.1).

    Here                    in arenas on their device (M_D, see `arena`)
    Split(group, inner)     each rank of the tensor group keeps 1/t and gathers the rest when it is needed (P_a): the
                            inputs of layers are the same on all of them, so keeping them t times is waste
    Host                    in arenas in the host's memory; from a GPU, pinned and copied beside the computation
                            (P_a+cpu)
    File                    in files, for when even that is too small

Every store copies, so that no checkpoint lies among short-lived activations. Stores nest: `Split(tensor, Host())` is
P_a+cpu. A store counts what it holds.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol, final

import torch
from torch import Tensor

from meshwright.comm.group import Group
from meshwright.parallel.arena import Arena, Arenas


class Kept(Protocol):
    """A copy of a tensor, put away: first `restore`, then `release`, each once."""

    def restore(self) -> Tensor:
        """The tensor as it was given, to be used until `release`."""

    def release(self) -> None:
        """What was restored is not needed any more, and the store lets go of it."""


class Store(ABC):
    """Keeps copies of tensors until they are released; `held` and `peak` are bytes of what is kept."""

    def __init__(self) -> None:
        self.held = 0
        self.peak = 0

    @abstractmethod
    def keep(self, tensor: Tensor) -> Kept:
        """Put a copy of `tensor` away."""

    @abstractmethod
    def reserve(self, like: Tensor, count: int) -> None:
        """So many tensors like this one are about to be kept: better to make room while little else is there."""

    @property
    @abstractmethod
    def reserved(self) -> int:
        """Bytes of the device that stay with the store between steps."""

    def _count(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)


@final
class Here(Store):
    """Keeps copies in arenas on the tensors' device."""

    def __init__(self) -> None:
        super().__init__()
        self._arenas: Arenas | None = None

    def keep(self, tensor: Tensor) -> Kept:
        """See `Store`."""
        self._count(tensor.nbytes)
        kept = _InArena(self, self._arena(tensor), tensor)
        kept.restore().copy_(tensor)
        return kept

    def reserve(self, like: Tensor, count: int) -> None:
        """See `Store`."""
        self._arena(like).reserve(count)

    def _arena(self, tensor: Tensor) -> Arena:
        self._arenas = self._arenas or Arenas(tensor.device)
        return self._arenas.fitting(tensor.nbytes)

    @property
    def reserved(self) -> int:
        """See `Store`."""
        return self._arenas.held_bytes if self._arenas else 0


@final
class _InArena:
    """A tensor like `like` in a slot of `arena`, its content undefined."""

    def __init__(self, store: Store, arena: Arena, like: Tensor) -> None:
        self._store = store
        self._arena = arena
        self._slot = arena.take()
        self._tensor = self._slot[: like.nbytes].view(like.dtype).view(like.shape)

    def restore(self) -> Tensor:
        return self._tensor

    def release(self) -> None:
        self._store._count(-self._tensor.nbytes)
        self._arena.give(self._slot)


@final
class Split(Store):
    """Keeps this rank's 1/t of a tensor that all ranks of `group` keep, in `inner`; padded where t does not divide."""

    def __init__(self, group: Group, inner: Store) -> None:
        super().__init__()
        self._group = group
        self._inner = inner

    def keep(self, tensor: Tensor) -> Kept:
        """See `Store`."""
        own = self._part(tensor)
        self._count(own.nbytes)
        return _Split(self, self._group, self._inner.keep(own), tensor.shape)

    def reserve(self, like: Tensor, count: int) -> None:
        """See `Store`."""
        self._inner.reserve(self._part(like), count)

    def _part(self, tensor: Tensor) -> Tensor:
        flat = tensor.reshape(-1)
        size = -(-flat.numel() // self._group.size)
        own = flat[self._group.index * size : (self._group.index + 1) * size]
        return own if own.numel() == size else torch.cat([own, own.new_zeros(size - own.numel())])

    @property
    def reserved(self) -> int:
        """See `Store`."""
        return self._inner.reserved


@final
class _Split:
    def __init__(self, store: Split, group: Group, own: Kept, shape: torch.Size) -> None:
        self._store = store
        self._group = group
        self._own = own
        self._shape = shape

    def restore(self) -> Tensor:
        own = self._own.restore()
        whole = own.new_empty(own.numel() * self._group.size)
        self._group.all_gather(own, whole, label="checkpoints")
        self._store._count(-own.nbytes)
        self._own.release()
        return whole[: self._shape.numel()].view(self._shape)

    def release(self) -> None:
        """What was gathered is nobody's but the caller's."""


@final
class Host(Store):
    """Keeps copies in arenas in the host's memory."""

    def __init__(self) -> None:
        super().__init__()
        self._arenas: Arenas | None = None
        self._stream: torch.cuda.Stream | None = None

    def keep(self, tensor: Tensor) -> Kept:
        """See `Store`. From a GPU the copy runs on a stream of its own."""
        self._count(tensor.nbytes)
        kept = _InArena(self, self._arena(tensor), tensor)
        if not tensor.is_cuda:
            kept.restore().copy_(tensor)
            return kept
        self._stream = self._stream or torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        # Also behind what was last read from the slot, on the way back to the GPU.
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            kept.restore().copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return _OnHost(kept, tensor.device, self._stream)

    def reserve(self, like: Tensor, count: int) -> None:
        """See `Store`."""
        self._arena(like).reserve(count)

    def _arena(self, tensor: Tensor) -> Arena:
        self._arenas = self._arenas or Arenas(torch.device("cpu"), pinned=tensor.is_cuda)
        return self._arenas.fitting(tensor.nbytes)

    @property
    def reserved(self) -> int:
        """See `Store`: of a GPU nothing, of a CPU the arenas."""
        return self._arenas.held_bytes if self._arenas and self._stream is None else 0


@final
class _OnHost:
    """Kept for a GPU, in memory of the host."""

    def __init__(self, kept: _InArena, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._kept = kept
        self._device = device
        self._stream = stream

    def restore(self) -> Tensor:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return self._kept.restore().to(self._device, non_blocking=True)

    def release(self) -> None:
        self._kept.release()


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

    def reserve(self, like: Tensor, count: int) -> None:
        """See `Store`; files need no room in advance."""

    @property
    def reserved(self) -> int:
        """See `Store`."""
        return 0


@final
class _InFile:
    def __init__(self, store: File, path: Path, like: Tensor) -> None:
        self._store = store
        self._path = path
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device

    def restore(self) -> Tensor:
        tensor = torch.empty(self._shape, dtype=self._dtype)
        with self._path.open("rb") as file:
            file.readinto(tensor.view(-1).view(torch.uint8).numpy().data)
        return tensor.to(self._device)

    def release(self) -> None:
        self._store._count(-self._path.stat().st_size)
        self._path.unlink()
