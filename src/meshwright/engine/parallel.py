"""A module that trains over the ranks of the data axis with ZeRO: what `parallelize` returns.

Whole steps (`step`, `evaluate`) know the layout's micro-batches and overlap reductions with the last backward pass; by
hand (`backward` any number of times, then `update`) everything can be done in between. Both end in `engine.update`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.engine.engine import Evaluation, StepResult
from meshwright.engine.graph import digest, order_of_leaves
from meshwright.engine.installed import Installed
from meshwright.engine.release import FirstSteps
from meshwright.engine.states import ParameterState, known_states, load_states
from meshwright.engine.update import Outcome, Update
from meshwright.layout.layout import Layout
from meshwright.layout.zero import StateBytes
from meshwright.parallel.precision import LossScale
from meshwright.parallel.zero import ShardedOptimizer


@dataclass(frozen=True)
class LossSum:
    """A loss that is a sum over `count` things (tokens, samples), so that batches of any sizes weigh rightly."""

    total: Tensor
    count: int


LossFunction = Callable[[nn.Module, Any], Tensor | LossSum]
"""Runs the module on a batch; a scalar that is a mean counts the same for every micro-batch of every rank."""


class Parallel:
    """A module that trains over several ranks; every rank calls the same methods in the same order.

    `module` is the user's own, and calling this object calls it. `optimizer` has the optimizer's options (a
    learning-rate scheduler may change them) and no parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        installed: Installed,
        optimizer: ShardedOptimizer,
        loss: LossFunction | None,
        clip: float | None,
    ) -> None:
        self.module = module
        self.layout = layout
        self.groups = installed.groups
        self._installed = installed
        self._sharded = optimizer
        self._loss = loss
        self._by_hand = False
        half = any(unit.setting.precision.compute is torch.float16 for unit in optimizer.units)
        self.loss_scale = LossScale(torch.float16 if half else torch.float32)
        places = {number: unit for number, unit in enumerate(installed.units) if unit.trainable}
        self._update = Update(optimizer, places, self.groups, self.loss_scale, clip)
        self._first_steps = FirstSteps(self.groups.device)
        self._names = sorted(slot.name for unit in optimizer.units for slot in unit.slots)
        self._norms = [norm for norm in module.modules() if isinstance(norm, nn.modules.batchnorm._NormBase)]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The options of the parameter groups, in a torch optimizer that owns nothing."""
        return self._sharded.options

    # --- by hand ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; floating-point inputs are not converted."""
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, averaged over the data ranks, to what `update` will use.

        Every rank must call it as often, each with a loss of its own. An error in it, as one in `step`, ends the step:
        all gradients since the last update are forgotten.
        """
        self._by_hand = True
        self._backward(_times(loss, self.loss_scale.value / self.groups.data.size), last=False)

    def update(self) -> Outcome:
        """Update the parameters with the gradients since the last update, unless those are not finite."""
        self._by_hand = False
        if not self._installed.setting.sharding.gradients:
            self._installed.reducing.reduce_rest()
        return self._finish(self._summed(()), unscale=1 / self.loss_scale.value)

    # --- a whole step ------------------------------------------------------------------------------------------------

    def step(self, batches: Sequence[Any]) -> StepResult:
        """Train on the micro-batches of this data rank: m of them, or fewer where a rank has run out of data.

        The loss is the sum over all ranks and micro-batches divided by the count (see `LossSum`).

        Raises:
            ValueError: there is no loss function, there are more than m batches, or no rank has anything to learn from.
            RuntimeError: `backward` was called, and `update` was not.
        """
        if self._by_hand:
            raise RuntimeError("gradients of `backward` wait for `update`; call it before `step`")
        with self._forgotten_on_error():
            return self._step(batches)

    def _step(self, batches: Sequence[Any]) -> StepResult:
        device = self.groups.device
        total, count, reference = torch.zeros((), dtype=torch.float64, device=device), 0, 1.0
        for number, batch in enumerate(self._padded(batches)):
            loss = self._forward(batch)
            if number == 0:
                reference = self._reference(loss)
            scaled = None if loss is None else _times(loss.total, self.loss_scale.value / reference)
            self._backward(scaled, last=number == self.layout.micro_batches - 1)
            if loss is not None:
                total, count = total + loss.total.detach(), count + loss.count
        sums = self._summed((total, torch.tensor(count, dtype=torch.float64, device=device)))
        total_sum, all_counted = sums.extra
        if all_counted == 0:
            raise ValueError("the batch has nothing to learn from: the count of every rank is 0")
        if len(sums.unused) == len(self._names):
            raise ValueError("the losses of all ranks depend on no parameter that is trained")
        outcome = self._finish(sums, unscale=reference / (all_counted * self.loss_scale.value))
        return StepResult(total_sum / all_counted, outcome.norm, int(all_counted), outcome.fault)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Any]) -> Evaluation:
        """The loss of up to m micro-batches of every rank, in the module's evaluation mode.

        Raises:
            ValueError: as `step`.
        """
        training = [module for module in self.module.modules() if module.training]
        self.module.eval()
        total, count = 0.0, 0
        try:
            for loss in map(self._forward, self._padded(batches)):
                if loss is not None:
                    total, count = total + float(loss.total), count + loss.count
            self._finish_forwards()
        finally:
            for module in training:
                module.training = True
        sums = torch.tensor([total, count], dtype=torch.float64, device=self.groups.device)
        self.groups.data.all_reduce(sums, label="evaluation")
        if sums[1] == 0:
            raise ValueError("no rank has anything to evaluate")
        return Evaluation(float(sums[0] / sums[1]), int(sums[1]))

    def _padded(self, batches: Sequence[Any]) -> Iterator[Any]:
        m = self.layout.micro_batches
        if len(batches) > m:
            raise ValueError(f"{len(batches)} micro-batches were given; the layout {self.layout} takes up to {m}")
        yield from batches
        yield from [None] * (m - len(batches))

    def _forward(self, batch: Any) -> LossSum | None:
        """The loss of a micro-batch; None where there is none."""
        if self._loss is None:
            raise ValueError("parallelize was given no loss function; give it one, or use `backward` and `update`")
        if batch is None:
            return None
        loss = self._loss(self.module, batch)
        return LossSum(loss, 1) if isinstance(loss, Tensor) else loss

    def _finish_forwards(self) -> None:
        """Return when no rank calls the module any more: those that do may need this rank's shards."""
        if self._installed.hooks is not None:
            self._installed.hooks.finish_forwards()

    def _reference(self, loss: LossSum | None) -> float:
        """About the count of the whole step, equal on all ranks: losses are divided by it before they are known all.

        What is missing to the true count is made up for at the end; so 16-bit gradients neither vanish nor overflow.
        """
        self._finish_forwards()
        count = torch.tensor([loss.count if loss else 0], dtype=torch.float64, device=self.groups.device)
        self.groups.data.all_reduce(count, label="loss count")
        return max(1.0, float(count) * self.layout.micro_batches)

    def _backward(self, loss: Tensor | None, last: bool) -> None:
        """A backward pass, in which a rank without a loss only takes part."""
        hooks, reducing = self._installed.hooks, self._installed.reducing
        with self._forgotten_on_error():
            self._installed.require_frozen()
            alike = True
            if hooks is not None:
                order = order_of_leaves(loss, reducing.names)
                alike = hooks.begin_backward(-1 - self.groups.rank if order is None else digest(order))
            reducing.begin(last, alike)
            if loss is not None and loss.requires_grad:
                torch.autograd.backward([loss])
            if hooks is not None:
                hooks.end_backward()
            reducing.end()

    # --- the end of a step -------------------------------------------------------------------------------------------

    def _summed(self, extra: Sequence[Tensor]) -> _Sums:
        """Sum over all ranks: the squares of the gradient, `extra`, and who has a gradient for which parameter."""
        units, touched = self._sharded.units, self._installed.reducing.touched
        for unit in units:
            unit.gradient.start_sync()
        for unit in units:
            unit.gradient.finish_sync()
        square = self._sharded.square_norm(lambda unit: True)
        used = torch.tensor([float(name in touched) for name in self._names], dtype=torch.float64)
        vector = torch.cat([torch.stack([square, *extra]), used.to(self.groups.device)])
        self.groups.data.all_reduce(vector, label="loss and norm")
        square_sum, *rest = vector.tolist()
        flags = rest[len(extra) :]
        unused = frozenset(name for name, flag in zip(self._names, flags, strict=True) if not flag)
        return _Sums(square_sum, tuple(rest[: len(extra)]), unused)

    def _finish(self, sums: _Sums, unscale: float) -> Outcome:
        outcome = self._update.finish(sums.square, unscale, sums.unused)
        self._rest()
        return outcome

    def _rest(self) -> None:
        """Bring everything to how it stands between steps."""
        self._installed.reducing.touched.clear()
        torch.clear_autocast_cache()  # it has copies of what was updated
        if self._installed.hooks is None:
            self._installed.make_whole()
        self._average_statistics()
        self._first_steps.ended()

    def _average_statistics(self) -> None:
        """Give all ranks the mean of what their BatchNorm layers have seen; of counts, rounded up."""
        buffers = [buffer for norm in self._norms if norm.training for buffer in norm.buffers(recurse=False)]
        if not buffers or self.groups.data.size == 1:
            return
        flat = torch.cat([buffer.reshape(-1).double() for buffer in buffers])
        self.groups.data.all_reduce(flat, label="statistics")
        parts = torch.split(flat / self.groups.data.size, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_((part if buffer.is_floating_point() else part.ceil()).view(buffer.shape))

    @contextmanager
    def _forgotten_on_error(self) -> Iterator[None]:
        """Leave no pass under way behind an error, and no gradient of half a step."""
        try:
            yield
        except BaseException:
            self._by_hand = False
            self._installed.reducing.abandon()
            if self._installed.hooks is not None:
                self._installed.hooks.abandon()
            raise

    # --- what there is -----------------------------------------------------------------------------------------------

    def whole(self) -> AbstractContextManager[None]:
        """Within it all parameters of the module can be read; every rank must enter it."""
        return self._installed.whole()

    def states(self) -> Iterator[ParameterState]:
        """Everything that is known of every parameter, frozen ones included; every rank must exhaust it."""
        return known_states(self._installed, self._sharded)

    def load_states(self, states: Mapping[str, ParameterState]) -> None:
        """Go on from what `states` gave, over any layout; every rank must call it, with the same.

        Raises:
            ValueError: a parameter is missing, unknown, or has another shape, or another optimizer trained it. Nothing
                has been changed then.
        """
        load_states(self._installed, self._sharded, states)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole module's parameters and buffers under its own names, on every rank, as it computes with them."""
        with self.whole():
            return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def state_bytes(self) -> StateBytes:
        """Measured bytes of this rank's parameters, gradients and optimizer states between steps."""
        parameters, gradients = zip(*(unit.state_bytes for unit in self._installed.units), strict=True)
        return StateBytes(sum(parameters), sum(gradients), self._sharded.state_bytes)

    @property
    def buffer_bytes(self) -> int:
        """Bytes on the device that steps use again and again: whole gradients on their way."""
        return self._installed.pool.held_bytes


@dataclass(frozen=True)
class _Sums:
    """What all ranks know at the end of a step: the square of the norm, sums, and who is without a gradient."""

    square: float
    extra: tuple[float, ...]
    unused: frozenset[str]


def _times(loss: Tensor, factor: float) -> Tensor:
    """Widened, for a factor may be more than 16 bits hold."""
    return loss.to(torch.promote_types(loss.dtype, torch.float32)) * factor
