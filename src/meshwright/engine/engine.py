"""The engine of one rank: a stage, its units, its optimizer and the lowered programs, behind `step` and `evaluate`.

`build` puts it together from a model's description, a layout and the rank's groups. One process is the case where
every axis has size 1; there is no other path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm.connect import Groups
from meshwright.comm.group import Group
from meshwright.engine.fault import Fault
from meshwright.engine.interpreter import Interpreter
from meshwright.engine.release import FirstSteps
from meshwright.engine.stage import Flight, Stage
from meshwright.engine.tracer import Tracer
from meshwright.engine.update import Update
from meshwright.layout.layout import Layout
from meshwright.layout.zero import StateBytes
from meshwright.model.batch import MicroBatch
from meshwright.parallel.flat import Slot
from meshwright.parallel.parameter import join
from meshwright.parallel.precision import LossScale
from meshwright.parallel.unit import Unit
from meshwright.parallel.zero import ShardedOptimizer
from meshwright.schedule.catalog import build as build_schedule
from meshwright.schedule.catalog import forward_only
from meshwright.schedule.passes import lower
from meshwright.schedule.program import Program
from meshwright.schedule.schedule import Schedule


@dataclass(frozen=True)
class StepResult:
    """What one step did, the same on every rank: loss per token, and the norm of the whole gradient before clipping.

    If there is a `fault`, the gradient was not finite and the weights were left alone.
    """

    loss: float
    gradient_norm: float
    tokens: int
    fault: Fault | None

    @property
    def skipped(self) -> bool:
        """Whether the weights were left alone."""
        return self.fault is not None


@dataclass(frozen=True)
class GlobalTensor:
    """A parameter, or its gradient, in the whole model's shape and under its global name."""

    name: str
    value: Tensor


@dataclass(frozen=True)
class Evaluation:
    """Mean loss per token over the evaluated micro-batches of the whole mesh, the same on every rank."""

    loss: float
    tokens: int


class Engine:
    """Trains and evaluates on one rank of a mesh; every rank calls the same methods in the same order."""

    def __init__(
        self, layout: Layout, stage: Stage, groups: Groups, optimizer: ShardedOptimizer, clip: float | None
    ) -> None:
        self.layout = layout
        self.stage = stage
        self.groups = groups
        self.optimizer = optimizer
        self.loss_scale = LossScale(stage.dtype)
        self._update = Update(optimizer, self._places(), groups, self.loss_scale, clip)
        # Set by `step` for `_optimize`, which the program's STEP calls in the middle of it.
        self._inspect: Callable[[], None] = _nothing
        self._tokens = 0
        self._result: StepResult | None = None
        self._first_steps = FirstSteps(groups.device)
        self._interpreter = Interpreter(stage, groups, self._connect_ties(), self._optimize)
        schedule = build_schedule(layout.schedule, layout.pipeline, layout.micro_batches)
        self.program = self._lower(schedule)
        self.evaluation_program = self._lower(forward_only(layout.pipeline, layout.micro_batches))
        self._silent = Tracer(groups.rank, groups.device, enabled=False)

    def _connect_ties(self) -> Mapping[str, Group]:
        """A group for each tied unit that this rank holds, over the stages that hold it."""
        cut = self.stage.cut
        return {
            tie.name: self.groups.among_stages(tie.name, cut.tie_stages(tie))
            for tie in cut.ties
            if self.groups.pipeline.index in cut.tie_stages(tie)
        }

    def _places(self) -> dict[int, Unit]:
        """This stage's units by the layer that uses them last in the forward pass."""
        ties = {tie.name: max(tie.layers) for tie in self.stage.cut.ties}
        layers = {name: unit for name, unit in self.stage.units.items() if name not in ties}
        # A tie counts as half a layer below the layer that uses it last: doubled, so that all places are whole numbers.
        places = {2 * int(name): unit for name, unit in layers.items()}
        places |= {2 * ties[name] - 1: unit for name, unit in self.stage.units.items() if name in ties}
        return places

    def _lower(self, schedule: Schedule) -> Program:
        schedule.check()
        return lower(schedule, self.groups.pipeline.index, self.stage.cut, self.layout)

    # --- the step ------------------------------------------------------------------------------------------------

    def step(
        self,
        batches: Sequence[MicroBatch],
        learning_rate: float,
        inspect: Callable[[], None] | None = None,
        tracer: Tracer | None = None,
    ) -> StepResult:
        """Train on the m micro-batches of this data rank (each may hold any number of samples, also none).

        The loss is the sum over tokens divided by the tokens of the whole batch, so neither uneven micro-batches nor
        ignored tokens change it. `inspect` is called when the gradients are complete, before clipping.

        Raises:
            ValueError: another number of micro-batches than the layout says, or no token to learn from on any rank.
        """
        self.optimizer.set_learning_rate(learning_rate)
        self._inspect = inspect or _nothing
        self._run(self.program, batches, tracer)
        self._first_steps.ended()
        assert self._result is not None, "the program has a STEP"
        return self._result

    def evaluate(self, batches: Sequence[MicroBatch]) -> Evaluation:
        """The mean loss of this data rank's m micro-batches and those of the other ranks; no gradient, no dropout."""
        flight = self._run(self.evaluation_program, batches, None)
        (loss_sum,) = self._sum_over_world([self._loss_share(flight)])
        return Evaluation(loss_sum / self._tokens, self._tokens)

    def _run(self, program: Program, batches: Sequence[MicroBatch], tracer: Tracer | None) -> Flight:
        if len(batches) != self.layout.micro_batches:
            raise ValueError(
                f"{len(batches)} micro-batches were given; the layout {self.layout} takes {self.layout.micro_batches}"
            )
        device = self.groups.device
        own = sum(batch.token_count for batch in batches)
        count = torch.tensor([own], dtype=torch.float64, device=device)
        self.groups.data.all_reduce(count, label="token count")
        self._tokens = int(count.item())
        if self._tokens == 0:
            raise ValueError("the batch has no token to learn from: every target of every rank is ignored")
        flight = Flight(
            batches=batches,
            loss_scale=(self.loss_scale.value / count).reshape(()),
            loss_sum=torch.zeros((), dtype=torch.float64, device=device),
        )
        self._interpreter.run(program, flight, tracer or self._silent)
        return flight

    def _optimize(self, flight: Flight) -> None:
        """What STEP does: the norm of the whole gradient, each unique element once; clip; update if it is finite."""
        self._inspect()
        square = self.optimizer.square_norm(self._answers_for)
        square_sum, loss_sum = self._sum_over_world([square, self._loss_share(flight)])
        outcome = self._update.finish(square_sum, 1 / self.loss_scale.value)
        self._result = StepResult(loss_sum / self._tokens, outcome.norm, self._tokens, outcome.fault)

    def _answers_for(self, unit: Unit) -> bool:
        """Whether this stage counts the unit's elements: of the stages that hold a tied parameter, the first does."""
        ties = [tie for tie in self.stage.cut.ties if tie.name == unit.name]
        return all(self.stage.cut.tie_stages(tie)[0] == self.groups.pipeline.index for tie in ties)

    def _loss_share(self, flight: Flight) -> Tensor:
        """This rank's part of the loss sum: the tensor ranks hold replicas, and only the last stage holds anything."""
        return flight.loss_sum if self.groups.tensor.index == 0 else torch.zeros_like(flight.loss_sum)

    def _sum_over_world(self, values: Sequence[Tensor]) -> list[float]:
        vector = torch.stack([value.double() for value in values])
        self.groups.world.all_reduce(vector, label="loss and norm")
        return [float(value) for value in vector.tolist()]

    # --- what the engine holds -----------------------------------------------------------------------------------

    def state_bytes(self) -> StateBytes:
        """Measured bytes of this rank's parameters, gradients and optimizer states between steps."""
        parameters, gradients = zip(*(unit.state_bytes for unit in self.stage.units.values()), strict=True)
        return StateBytes(sum(parameters), sum(gradients), self.optimizer.state_bytes)

    @property
    def buffer_bytes(self) -> int:
        """Bytes on the device that steps use again and again: whole gradients on their way, and checkpoints."""
        return self.stage.buffer_bytes

    def global_tensors(self, gradients: bool = False) -> Iterator[GlobalTensor]:
        """This stage's parameters (or complete gradients, inside `inspect`) under global names and in global shapes.

        Every rank of the stage must exhaust it, and receives all; a tied parameter is given by the first stage that
        holds it.
        """
        for unit in self.stage.units.values():
            flat = unit.collect(unit.gradient.owned if gradients else unit.owned_value)
            if not self._answers_for(unit):
                continue
            for slot in unit.slots:
                local = flat[slot.start : slot.stop].view(slot.shape)
                yield GlobalTensor(slot.name, join(self._tensor_parts(local, slot), slot.spec))

    def _tensor_parts(self, local: Tensor, slot: Slot) -> Sequence[Tensor]:
        if slot.replicated:
            return [local]
        size = self.groups.tensor.size
        parts = local.new_empty(size * local.numel())
        self.groups.tensor.all_gather(local.reshape(-1), parts, label="export")
        return parts.view(size, *local.shape).unbind(0)


def _nothing() -> None:
    """Look at nothing."""
