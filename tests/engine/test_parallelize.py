"""Any module trains over ZeRO ranks like in one plain process, whatever it has and does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_module import Layer, Model
from torch import Tensor, nn

from meshwright import LossSum, parallelize
from meshwright.comm.connect import Groups
from meshwright.layout.layout import Layout
from pool import RankPool

STEPS = 4
SAMPLES = 8


class Lion(torch.optim.Optimizer):
    """An optimizer that a user wrote."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                p.sub_(group["lr"] * torch.sign(state["momentum"] * group["beta"] + p.grad * (1 - group["beta"])))
                state["momentum"].lerp_(p.grad, 1 - group["beta"])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1, foreach=True),
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3),
    "lion": Lion,
}


def samples(step: int) -> Tensor:
    """Eight samples; token 0, which the rare branch waits for, is in the first only, and not in every step."""
    tokens = torch.randint(1, 11, (SAMPLES, 6), generator=torch.Generator().manual_seed(step))
    if step % 2 == 0:
        tokens[0, 0] = 0
    return tokens


def loss(model: nn.Module, tokens: Tensor) -> LossSum:
    logits = model(tokens[:, :-1])["logits"]
    total = F.cross_entropy(logits.flatten(0, 1).double(), tokens[:, 1:].flatten(), reduction="sum")
    return LossSum(total, tokens[:, 1:].numel())


def grouped(model: Model) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "lr": 3e-3},
    ]


def fresh(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().double()


def plain(optimizer: str, clip: float | None) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The same in one process without us. The rare branch sees the micro-batch of the first sample only."""
    model = fresh()
    options = (
        grouped(model)
        if optimizer in ("adamw", "sgd")
        else [{"params": [p for p in model.parameters() if p.requires_grad]}]
    )
    stepper = OPTIMIZERS[optimizer](options)
    losses, norms = [], []
    for step in range(STEPS):
        stepper.zero_grad()
        found = [loss(model, part) for part in samples(step).split(2)]
        mean = sum(part.total for part in found) / sum(part.count for part in found)
        mean.backward()
        losses.append(mean.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)))
        stepper.step()
    return losses, norms, {name: value.clone() for name, value in model.state_dict().items()}


def ours(
    groups: Groups, layout: Layout, optimizer: str, units: Any, clip: float | None
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    # Only the first data rank's initial values count.
    module = fresh(groups.rank)
    options = grouped(module) if optimizer in ("adamw", "sgd") else None
    model = parallelize(
        module,
        layout,
        optimizer=OPTIMIZERS[optimizer],
        loss=loss,
        groups=groups,
        units=units,
        parameter_groups=options,
        clip=clip,
    )
    losses, norms = [], []
    for step in range(STEPS):
        mine = samples(step).split(2)[groups.data.index :: groups.data.size]
        result = model.step(mine)
        losses.append(result.loss)
        norms.append(result.gradient_norm)
    return losses, norms, model.state_dict()


def check(found: list[Any], optimizer: str, clip: float | None) -> None:
    losses, norms, weights = plain(optimizer, clip)
    for own_losses, own_norms, own_weights in found:
        assert own_losses == pytest.approx(losses, rel=1e-10)
        assert own_norms == pytest.approx(norms, rel=1e-10)
        assert own_weights.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(
                own_weights[name], value, rtol=1e-9, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
            )


UNITS = {"named": None, "class": Layer, "size": 60, "function": lambda name, module: isinstance(module, nn.Linear)}
LAYOUTS = [
    "dp2",
    "dp2/zero1",
    "dp2/zero2",
    "dp2/zero3",
    "dp2/zero3/prefetch0",
    "dp4/zero3/shard2",
    "dp4/zero1",
    "dp2/zero2/offload",
]


def micro(text: str) -> Layout:
    layout = Layout.parse(text)
    return Layout.parse(f"{text}/m{4 // layout.data}")


@pytest.mark.parametrize("text", LAYOUTS)
def test_any_module_trains_like_one_process_over_shared_memory(pool: RankPool, text: str) -> None:
    layout = micro(text)
    check(pool.run(layout.mesh, ours, layout, "adamw", None, 0.5), "adamw", 0.5)


@pytest.mark.parametrize("text", LAYOUTS)
def test_any_module_trains_like_one_process_over_gloo(gloo_pool: RankPool, text: str) -> None:
    layout = micro(text)
    check(gloo_pool.run(layout.mesh, ours, layout, "adamw", None, 0.5), "adamw", 0.5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("text", ["dp2/zero1", "dp2/zero3"])
def test_every_elementwise_optimizer_steps_shards_as_it_steps_parameters(
    gloo_pool: RankPool, text: str, optimizer: str
) -> None:
    layout = micro(text)
    check(gloo_pool.run(layout.mesh, ours, layout, optimizer, None, None), optimizer, None)
