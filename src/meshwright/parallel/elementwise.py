"""Which torch optimizers ZeRO can divide: those that treat every element by itself.

A rank's shard begins and ends in the middle of matrices, and holds pieces of several. AdamW, Adam, SGD, Adagrad or
RMSprop compute the same on such pieces as on whole parameters. One that uses a norm of the whole parameter (LAMB,
LARS), its rows and columns (Adafactor, Shampoo, Muon), something of all parameters together (Prodigy), or random
numbers computes something else, and is refused before any training is done. Whether it does is found out by trying, not
from a list of names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes a torch optimizer from parameter groups: dicts with "params" (tensors) and the options of the group."""

_SHAPES: Sequence[tuple[int, ...]] = ((4, 6), (5,), (3, 2, 2))
_PIECES: Sequence[tuple[int, ...]] = ((7,), (1,), (18,), (15,))
"""The same elements, in pieces that begin and end inside of the parameters."""

_STEPS = 3

_LEARNING_RATE = 0.1
"""While trying: the user's may be so small, as at the start of a warm-up, that nothing shows."""


def require_elementwise(
    factory: OptimizerFactory, options: Sequence[Mapping[str, Any]], dtype: torch.dtype, device: torch.device
) -> None:
    """Let the optimizer step some small parameters whole and in pieces, under the options of every group.

    Raises:
        ValueError: it needs a closure to step, or refuses pieces, or what it does to an element depends on others.
    """
    for number, group in enumerate(options):
        try:
            whole = _tried(factory, group, _SHAPES, dtype, device, together=True)
            pieces = _tried(factory, group, _PIECES, dtype, device, together=False)
        except (TypeError, RuntimeError, ValueError, AssertionError) as error:
            raise ValueError(
                f"the optimizer of group {number} cannot step flat pieces of parameters, which is what ZeRO gives it: "
                f"{type(error).__name__}: {error}; {_REMEDY}"
            ) from error
        worst = float((whole - pieces).abs().max())
        if not worst <= 1e-4 * float(whole.abs().max()):
            name = type(factory([{"params": [torch.zeros(1, dtype=dtype, device=device)], **group}])).__name__
            raise ValueError(
                f"{name} does not work element by element: stepped in pieces, elements that should move by about "
                f"{float(whole.abs().mean()):.2g} differ by up to {worst:.2g} after {_STEPS} steps; {_REMEDY}"
            )


_REMEDY = "take one that does, such as AdamW, Adam, SGD, Adagrad or RMSprop"


def _tried(
    factory: OptimizerFactory,
    group: Mapping[str, Any],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    together: bool,
) -> Tensor:
    """How far all elements move in a few steps with the same values and gradients, as parameters of these shapes.

    `together`: by one optimizer, as torch's users do; else each by an optimizer of its own, as different ranks do.
    """
    sizes = [torch.Size(shape).numel() for shape in shapes]
    ramp = torch.linspace(-1, 1, sum(sizes), dtype=dtype, device=device)
    values = [part.clone().view(shape) for part, shape in zip(torch.split(ramp + 2, sizes), shapes, strict=True)]
    optimizers = [factory([{"params": some, **group}]) for some in ([values] if together else [[v] for v in values])]
    for options in (options for optimizer in optimizers for options in optimizer.param_groups):
        options["lr"] = _LEARNING_RATE
    for step in range(1, _STEPS + 1):
        gradient = torch.sin(step * 5 * ramp) * step
        for value, part in zip(values, torch.split(gradient, sizes), strict=True):
            value.grad = part.clone().view(value.shape)
        for optimizer in optimizers:
            optimizer.step()
    return torch.cat([value.reshape(-1) for value in values]) - (ramp + 2)
