"""One function per rival: it sets the system up on one process, and returns what trains on a batch.

Everything here is the rival's public interface, used as its documentation recommends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from contest.model import initialised
from contest.work import LEARNING_RATE, SEED, WEIGHT_DECAY, Batch, Seat

Train = Callable[[Batch], float]
"""One step of training on this rank's share of a batch; the mean loss of its tokens before the step."""

TIMEOUT = 300
"""Seconds after which a collective is given up."""


def limit(seat: Seat) -> Train:
    """One process that has all threads and the whole batch; bf16 by autocast."""
    model = initialised(seat.work.spec, SEED)
    return _loop(model, _adamw(model.parameters()), autocast=seat.work.bf16)


def limit_bf16(seat: Seat) -> Train:
    """One process whose weights and moments are bf16: less work than any of the others does, and less exact."""
    model = initialised(seat.work.spec, SEED).bfloat16()
    return _loop(model, _adamw(model.parameters()), autocast=False)


def ddp(seat: Seat, **options: Any) -> Train:
    """DistributedDataParallel; bf16 by autocast."""
    model = _ddp(seat, **options)
    return _loop(model, _adamw(model.parameters()), autocast=seat.work.bf16)


def ddp_zero(seat: Seat, **options: Any) -> Train:
    """DistributedDataParallel whose optimizer states are divided; bf16 by autocast."""
    model = _ddp(seat)
    settings: dict[str, Any] = {"parameters_as_bucket_view": True} | options
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        fused=True,
        **settings,
    )
    return _loop(model, optimizer, autocast=seat.work.bf16)


def fsdp2(seat: Seat, reshard: bool = True, prefetch: int = 1, reduce: torch.dtype | None = None) -> Train:
    """fully_shard of every layer; bf16 by its own policy."""
    _meet(seat)
    model = initialised(seat.work.spec, SEED)
    policy = MixedPrecisionPolicy()
    if seat.work.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce or torch.bfloat16)
    mesh = init_device_mesh("cpu", (seat.ranks,))
    layers: list[nn.Module] = [model.embedding, *model.blocks, model.head]
    for layer in (*layers, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for forward in (True, False) if prefetch else ():
        _prefetch(layers if forward else layers[::-1], prefetch, forward)
    return _loop(model, _adamw(model.parameters()), autocast=False)


def fsdp2_keep(seat: Seat, **options: Any) -> Train:
    """fully_shard that keeps the parameters whole from the forward pass to the backward pass."""
    return fsdp2(seat, reshard=False, **options)


def deepspeed(seat: Seat, stage: int, **options: Any) -> Train:
    """DeepSpeed's ZeRO; bf16 as a mode of its own."""
    library = import_module("deepspeed")
    os.environ |= {"RANK": str(seat.rank), "LOCAL_RANK": str(seat.rank), "WORLD_SIZE": str(seat.ranks)}
    _meet(seat)
    library.init_distributed("gloo", verbose=False, dist_init_required=False)
    model = initialised(seat.work.spec, SEED)
    settings = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True} | options
    engine, *_ = library.initialize(
        model=model,
        optimizer=_adamw(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": seat.work.samples // seat.ranks,
            "steps_per_print": 10**9,
            "bf16": {"enabled": seat.work.bf16},
            "zero_optimization": settings,
        },
    )

    def train(batch: Batch) -> float:
        loss: Tensor = engine(batch.tokens, batch.targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return train


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, autocast: bool) -> Train:
    """The ordinary loop."""

    def train(batch: Batch) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss: Tensor = model(batch.tokens, batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return train


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


def _meet(seat: Seat) -> None:
    """Make the default process group."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{seat.meeting}",
        rank=seat.rank,
        world_size=seat.ranks,
        timeout=timedelta(seconds=TIMEOUT),
    )


def _ddp(seat: Seat, **options: Any) -> DistributedDataParallel:
    _meet(seat)
    settings: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": True} | options
    return DistributedDataParallel(initialised(seat.work.spec, SEED), **settings)


def _prefetch(layers: list[nn.Module], depth: int, forward: bool) -> None:
    """Have each layer gather the next `depth` of them while it computes."""
    units = [layer for layer in layers if isinstance(layer, FSDPModule)]
    for place, unit in enumerate(units):
        following: list[FSDPModule] = [*units[place + 1 : place + 1 + depth]]
        if forward:
            unit.set_modules_to_forward_prefetch(following)
        else:
            unit.set_modules_to_backward_prefetch(following)
