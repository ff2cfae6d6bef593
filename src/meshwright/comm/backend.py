"""What this project uses of torch's backend objects; gloo's and NCCL's have the same methods, which stubs leave out.

The names are torch's; the two with a leading underscore are what `reduce_scatter_tensor` and `all_gather_into_tensor`
call.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch import Tensor


class Backend(Protocol):
    """A process group's collectives and messages; each returns a Work to wait for."""

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> dist.Work:
        """Combine in place."""

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> dist.Work:
        """Copy from one rank to all."""

    def alltoall_base(
        self, target: Tensor, source: Tensor, target_sizes: list[int], source_sizes: list[int], options: Any
    ) -> dist.Work:
        """Send part i of `source` to rank i; empty sizes mean equal parts."""

    def _reduce_scatter_base(self, target: Tensor, source: Tensor) -> dist.Work: ...

    def _allgather_base(self, target: Tensor, source: Tensor) -> dist.Work: ...

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Send one tensor."""

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Receive one tensor."""

    def barrier(self) -> dist.Work:
        """Meet."""


def gloo(store: dist.Store, index: int, size: int, device: Any, timeout: float) -> Backend:
    """A gloo backend for CPU tensors over one network `device` (see `gloo_device`)."""
    # torch offers the constructor of gloo's own options only under this name.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    options._threads = 2
    options._devices = [device]
    return cast(Backend, dist.ProcessGroupGloo(store, index, size, options))


def gloo_device(local: bool, interface: str) -> Any:
    """Where gloo listens: on the loopback alone for a run on one machine, else on `interface` or the default one."""
    if local:
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


def nccl(store: dist.Store, index: int, size: int, timeout: float, urgent: bool) -> Backend:
    """An NCCL backend for the current GPU of this process, on streams of its own; `urgent` ones go before others."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
    options._timeout = timedelta(seconds=timeout)
    return cast(Backend, dist.ProcessGroupNCCL(store, index, size, options))
