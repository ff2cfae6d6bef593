"""Optimizers that ZeRO can divide are accepted, others refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from meshwright.parallel.elementwise import require_elementwise

CPU = torch.device("cpu")


class Custom(torch.optim.Optimizer):
    """Moves each parameter as `rule` says, which sees all of them."""

    def __init__(self, params: Any, rule: Callable[[list[Any], Any], torch.Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        moves = [self.rule(every, p) for p in every]
        for p, move in zip(every, moves, strict=True):
            p.sub_(self.param_groups[0]["lr"] * move)


def lamb(every: list[Any], p: Any) -> torch.Tensor:
    return p.grad / p.grad.norm() * p.norm()


def clipped_together(every: list[Any], p: Any) -> torch.Tensor:
    return p.grad / torch.stack([q.grad.norm() for q in every]).norm()


def clipped_alone(every: list[Any], p: Any) -> torch.Tensor:
    return p.grad.clamp(-1, 1)


def noisy(every: list[Any], p: Any) -> torch.Tensor:
    return p.grad + 0.01 * torch.randn_like(p)


def centred(every: list[Any], p: Any) -> torch.Tensor:
    return p.grad - p.grad.mean() if p.ndim > 1 else p.grad


ACCEPTED: dict[str, Any] = {
    "AdamW fused": partial(torch.optim.AdamW, fused=True),
    "AdamW foreach amsgrad": partial(torch.optim.AdamW, foreach=True, amsgrad=True),
    "Adam": partial(torch.optim.Adam, weight_decay=0.1),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "SGD nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop centered": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "Rprop": torch.optim.Rprop,
    "by the user": partial(Custom, rule=clipped_alone),
    "tensor as learning rate": partial(torch.optim.AdamW, lr=torch.tensor(1e-3)),
}

REFUSED: dict[str, Any] = {
    "LBFGS": torch.optim.LBFGS,
    "Adafactor": torch.optim.Adafactor,
    "LAMB": partial(Custom, rule=lamb),
    "LAMB at the start of a warm-up": partial(Custom, rule=lamb, lr=0.0),
    "a norm of all parameters": partial(Custom, rule=clipped_together),
    "random": partial(Custom, rule=noisy),
    "by the shape": partial(Custom, rule=centred),
    "of parameters with names": lambda groups: torch.optim.SGD(groups["params"]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ACCEPTED)
def test_optimizers_that_treat_every_element_by_itself_are_accepted(name: str, dtype: torch.dtype) -> None:
    require_elementwise(ACCEPTED[name], [{}, {"lr": 0.5}], dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_do_not_are_refused_with_the_reason(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"(element by element|cannot step flat pieces).*take one that does"):
        require_elementwise(REFUSED[name], [{}], dtype, CPU)


def test_the_trial_leaves_random_numbers_of_the_run_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    require_elementwise(torch.optim.AdamW, [{}], torch.float32, CPU)
    assert torch.equal(torch.rand(3), expected)
