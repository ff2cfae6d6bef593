"""Trains a module that knows nothing of meshwright, divided as the layout says.

    python examples/any_module.py                                                  one process
    torchrun --nproc-per-node 2 examples/any_module.py dp2/zero3                   two ranks, everything divided
    torchrun --nproc-per-node 4 examples/any_module.py dp4/zero2/shard2/m2         runs of two ranks, two micro-batches

Every way prints the same losses, to the rounding of float32: the batch is the same, whoever computes which part of it.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright
from meshwright import LossSum
from meshwright.layout.layout import Layout

SAMPLES = 32


def digits(step: int) -> tuple[Tensor, Tensor]:
    """Noisy pictures of ten shapes, (b, 1, 12, 12), and which shape each is."""
    shapes = torch.randn(10, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    noise = torch.Generator().manual_seed(1 + step)
    targets = torch.randint(10, (SAMPLES,), generator=noise)
    return shapes[targets] + 0.5 * torch.randn(SAMPLES, 1, 12, 12, generator=noise), targets


def network() -> nn.Module:
    """Convolutions and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(32 * 5 * 5, 128),
        nn.ReLU(inplace=True),
        nn.Linear(128, 10),
    )


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> LossSum:
    """The sum over the samples, and how many they are: parts of any size may then be added up."""
    pictures, targets = batch
    return LossSum(F.cross_entropy(module(pictures), targets, reduction="sum"), len(targets))


def main() -> None:
    """Twenty steps."""
    layout = Layout.parse(sys.argv[1] if len(sys.argv) > 1 else "dp1")
    torch.manual_seed(0)
    model = meshwright.parallelize(
        network(), layout, optimizer=partial(torch.optim.AdamW, lr=3e-3), loss=loss, clip=1.0
    )
    rank, parts = model.groups.data.index, layout.data * layout.micro_batches
    for step in range(20):
        pictures, targets = (part.chunk(parts) for part in digits(step))
        own = slice(rank * layout.micro_batches, (rank + 1) * layout.micro_batches)
        result = model.step(list(zip(pictures[own], targets[own], strict=True)))
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1:2}: loss {result.loss:.5f}, gradient norm {result.gradient_norm:.4f}", flush=True)
    states = model.state_bytes()
    print(f"rank {rank}: {states.total:,} bytes of parameters, gradients and optimizer states", flush=True)


if __name__ == "__main__":
    main()
