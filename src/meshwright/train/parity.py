"""Compares a layout with one process: loss, gradients, norm and weights, in float64, with dropout on.

The one process is a plain torch loop over the same layers: the whole batch at once, autograd through the whole model,
torch's own clipping and AdamW on the parameters as they are. It shares no unit, schedule, program, channel or group
with what it judges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.connect import Groups
from meshwright.comm.group import Reduction, SoloGroup
from meshwright.costs.spec import GPTSpec
from meshwright.engine.build import build
from meshwright.engine.engine import Engine, StepResult
from meshwright.layout.layout import Layout
from meshwright.layout.share import micro_batch_samples
from meshwright.model.batch import IGNORED, MicroBatch
from meshwright.model.gpt import build_layer, parameters_of
from meshwright.parallel.noise import Noise
from meshwright.parallel.parameter import initial_value


@dataclass(frozen=True)
class Case:
    """What is trained to compare: the model, the samples of a step, the steps, the clipping norm, and the seed."""

    spec: GPTSpec
    batch: int = 7
    steps: int = 3
    clip: float = 0.05
    learning_rate: float = 1e-2
    weight_decay: float = 0.1
    label_smoothing: float = 0.0
    seed: int = 5


@dataclass(frozen=True)
class Reference:
    """What one process computed: per step the loss, the norm and the gradients; and the weights at the end."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: tuple[Mapping[str, Tensor], ...]
    weights: Mapping[str, Tensor]


@dataclass(frozen=True)
class Deviations:
    """The largest relative differences from one process, over all steps and parameters."""

    loss: float
    norm: float
    gradient: float
    weight: float

    @property
    def largest(self) -> float:
        """Of all four."""
        return max(self.loss, self.norm, self.gradient, self.weight)


def whole_batch(case: Case, step: int) -> MicroBatch:
    """The samples of one step: random tokens, and targets of which more are ignored in some samples than in others."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    shape = (case.batch, case.spec.sequence)
    tokens = torch.randint(case.spec.vocabulary, shape, generator=generator)
    targets = torch.randint(case.spec.vocabulary, shape, generator=generator)
    share_ignored = torch.linspace(0, 0.6, case.batch).unsqueeze(1)
    targets[torch.rand(shape, generator=generator) < share_ignored] = IGNORED
    return MicroBatch(tokens, targets, Noise(case.seed, step, tuple(range(case.batch))), case.label_smoothing)


def part_of(whole: MicroBatch, samples: range, case: Case, step: int) -> MicroBatch:
    """Some consecutive samples of a batch, with their own noise."""
    rows = slice(samples.start, samples.stop)
    return MicroBatch(
        whole.tokens[rows], whole.targets[rows], Noise(case.seed, step, tuple(samples)), case.label_smoothing
    )


@lru_cache(maxsize=8)
def reference(case: Case) -> Reference:
    """Train `case` in this process, plainly."""
    solo = SoloGroup("tensor")
    layers, parameters = [], dict[str, nn.Parameter]()
    for index in range(case.spec.layers + 2):
        layer = build_layer(case.spec, index, solo, torch.device("cpu"), torch.float64)
        for entry in parameters_of(case.spec, index, layer):
            if entry.name not in parameters:
                value = initial_value(entry.spec, entry.name, case.seed).double()
                parameters[entry.name] = nn.Parameter(value)
            entry.owner.register_parameter(entry.attribute, parameters[entry.name])
        layers.append(layer)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": case.weight_decay},
            {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=case.learning_rate,
    )
    losses, norms, gradients = [], [], []
    for step in range(case.steps):
        batch = whole_batch(case, step)
        x = batch.tokens
        for layer in layers:
            x = layer(x, batch)
        loss = x / batch.token_count
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        losses.append(loss.item())
        gradients.append(
            {name: parameter.grad.clone() for name, parameter in parameters.items() if parameter.grad is not None}
        )
        norms.append(float(nn.utils.clip_grad_norm_(parameters.values(), case.clip)))
        optimizer.step()
    return Reference(
        tuple(losses), tuple(norms), tuple(gradients), {name: p.detach().clone() for name, p in parameters.items()}
    )


def make_engine(case: Case, layout: Layout, groups: Groups) -> Engine:
    """The engine that trains `case` over `layout`, in float64."""

    def optimizer(pieces: list[dict[str, Any]]) -> torch.optim.Optimizer:
        for group in pieces:
            group["weight_decay"] = case.weight_decay if group["decay"] else 0.0
        return torch.optim.AdamW(pieces, lr=case.learning_rate, fused=True)

    return build(case.spec, layout, groups, optimizer, seed=case.seed, dtype=torch.float64, clip=case.clip)


def train_step(engine: Engine, case: Case, step: int, inspect: Callable[[], None]) -> StepResult:
    """One step of `case` on this rank."""
    whole = whole_batch(case, step)
    samples = micro_batch_samples(case.batch, engine.layout, engine.groups.data.index)
    batches = [part_of(whole, part, case, step).to(engine.groups.device) for part in samples]
    return engine.step(batches, case.learning_rate, inspect)


def deviations(groups: Groups, case: Case, layout: Layout) -> Deviations:
    """Train `case` over `layout` and compare with one process; every rank must call this, and gets the same answer."""
    expected = reference(case)
    engine = make_engine(case, layout, groups)
    loss = norm = gradient = 0.0
    for step in range(case.steps):
        found: dict[str, Tensor] = {}
        result = train_step(engine, case, step, lambda found=found: found.update(_tensors(engine, gradients=True)))  # type: ignore[misc]
        loss = max(loss, _relative(result.loss, expected.losses[step]))
        norm = max(norm, _relative(result.gradient_norm, expected.norms[step]))
        gradient = max(gradient, _largest(found, expected.gradients[step]))
    weight = _largest(_tensors(engine), expected.weights)
    vector = torch.tensor([loss, norm, gradient, weight], dtype=torch.float64, device=groups.device)
    groups.world.all_reduce(vector, label="deviations", reduction=Reduction.MAX)
    return Deviations(*vector.tolist())


def _tensors(engine: Engine, gradients: bool = False) -> dict[str, Tensor]:
    return {tensor.name: tensor.value.cpu() for tensor in engine.global_tensors(gradients)}


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected)


def _largest(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of any element, relative to the largest element of its tensor."""
    assert found.keys() <= expected.keys(), f"unknown parameters {found.keys() - expected.keys()}"
    differences = (
        float((value - expected[name]).abs().max() / expected[name].abs().max().clamp_min(1e-300))
        for name, value in found.items()
    )
    return max(differences, default=0.0)
