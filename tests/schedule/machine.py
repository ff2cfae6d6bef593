"""A machine that runs a program without tensors and holds it to the laws; it knows the papers, not the passes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import product

from meshwright.layout.layout import Layout
from meshwright.layout.layout import Recompute as RecomputeMode
from meshwright.layout.zero import ZeroStage
from meshwright.schedule.cut import Cut
from meshwright.schedule.program import (
    Action,
    Backward,
    Forward,
    Gather,
    Program,
    Receive,
    Recompute,
    Reduce,
    Release,
    Send,
    Step,
    Sync,
    Tied,
)
from meshwright.schedule.schedule import Schedule


@dataclass
class Machine:
    """Runs the program of pipeline rank `rank`."""

    schedule: Schedule
    rank: int
    cut: Cut
    layout: Layout
    whole: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    activations: set[tuple[int, int]] = field(default_factory=set)
    gradients: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    reductions: list[str] = field(default_factory=list)
    synced: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)
    steps: int = 0
    gathered_after_step: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.zero < 3:
            self.whole.update(self.units)

    @property
    def zero(self) -> ZeroStage:
        return self.layout.zero

    @property
    def stages(self) -> list[int]:
        return [stage for stage in range(self.cut.stages) if self.schedule.rank_of(stage) == self.rank]

    @property
    def layers(self) -> list[int]:
        return [layer for stage in self.stages for layer in self.cut.layers(stage)]

    @property
    def units(self) -> set[str]:
        return {unit for layer in self.layers for unit in self.cut.units(layer)}

    def uses(self, unit: str) -> list[int]:
        return [layer for layer in self.layers if unit in self.cut.units(layer)]

    def run(self, program: Program) -> None:
        for action in program.actions:
            self.act(action)
        assert self.whole == (set() if self.zero == 3 else self.units)
        assert self.steps == (1 if self.schedule.trains else 0)
        assert not self.activations or not self.schedule.trains

    def act(self, action: Action) -> None:
        assert not self.steps or isinstance(action, Gather), "only gathers follow the step"
        match action:
            case Receive() | Send():
                pass
            case Forward(op, layer):
                assert self.whole.issuperset(self.cut.units(layer))
                if self.layout.recompute is RecomputeMode.NONE:
                    self.activations.add((op.micro_batch, layer))
            case Recompute(op, layer):
                assert self.layout.recompute is RecomputeMode.FULL
                assert self.whole.issuperset(self.cut.units(layer))
                self.kept.update(self.cut.units(layer))
                self.activations.add((op.micro_batch, layer))
                assert len(self.activations) == 1, "one layer's activations at a time"
            case Backward(op, layer):
                assert self.whole.issuperset(self.cut.units(layer))
                self.activations.remove((op.micro_batch, layer))
                self.kept.difference_update(self.cut.units(layer))
                for unit in self.cut.units(layer):
                    self.gradients[unit].append((op.micro_batch, layer))
            case Gather(unit):
                self.gather(unit)
            case Release(unit):
                assert self.zero == 3
                assert unit not in self.kept, "released between a recompute and its backward"
                self.whole.remove(unit)
            case Reduce(unit):
                self.reduce(unit)
            case Sync(unit):
                self.sync(unit)
            case Tied(unit):
                assert self.layout.replicas == 1 or unit in self.synced
                assert not any(self.gradients.values()), "a tie is summed when all is reduced"
                self.tied.append(unit)
            case Step():
                self.step()

    def gather(self, unit: str) -> None:
        if self.steps:
            self.gathered_after_step.append(unit)
            return
        assert self.zero == 3
        assert unit not in self.whole
        self.whole.add(unit)
        layers = [unit for unit in self.whole if unit.isdecimal()]
        assert len(layers) <= self.layout.prefetch + 1

    def sync(self, unit: str) -> None:
        assert self.layout.replicas > 1
        assert unit in self.reductions
        assert not self.gradients.get(unit), "the replicas are summed when the last reduction has begun"
        self.synced.append(unit)

    def reduce(self, unit: str) -> None:
        assert unit not in self.synced
        added = self.gradients.pop(unit)
        micro_batches = {micro_batch for micro_batch, _ in added}
        assert len(micro_batches) == (1 if self.zero >= 2 else self.schedule.micro_batches)
        assert sorted(added) == sorted(product(micro_batches, self.uses(unit))), "reduced before its last backward"
        self.reductions.append(unit)

    def step(self) -> None:
        assert not any(self.gradients.values()), "a gradient was never reduced"
        times = self.schedule.micro_batches if self.zero >= 2 else 1
        assert sorted(self.reductions) == sorted(list(self.units) * times)
        assert sorted(self.synced) == (sorted(self.units) if self.layout.replicas > 1 else [])
        shared = [tie.name for tie in self.cut.ties if tie.name in self.units and len(self.cut.tie_stages(tie)) > 1]
        assert self.tied == shared
        self.steps += 1
