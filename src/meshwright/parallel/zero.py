"""The sharded optimizer: torch optimizers over what this rank owns of every unit (ZeRO, section 5).

Clipping by the global norm and the step itself happen on flat runs of memory, of bounded length, so a fused optimizer
does each in a few kernels, and what is widened or carried to the host at once does not grow with the model (C_B). There
is a torch optimizer per unit; their options (learning rate, weight decay ...) are those of one that owns nothing, which
the user sees and a learning-rate scheduler changes. Nothing here knows the ZeRO stage: a unit says what it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.group import Reduction
from meshwright.parallel.elementwise import OptimizerFactory, require_elementwise
from meshwright.parallel.flat import Run, Slot
from meshwright.parallel.gradient import trace
from meshwright.parallel.remembered import Remembered
from meshwright.parallel.unit import Unit

NONE_UNUSED: frozenset[str] = frozenset()


class UnitOptimizer:
    """Steps the runs of one unit, each a parameter of a torch optimizer."""

    def __init__(self, unit: Unit, factory: OptimizerFactory, options: torch.optim.Optimizer) -> None:
        self.unit = unit
        self._options = options
        self._runs = {run: unit.master[run.part] for run in unit.runs()}
        self._groups = sorted({run.group for run in self._runs})
        self._factory = factory
        # A rank whose shard is padding only owns nothing and has nothing to step.
        self._optimizer = self._made() if self._groups else None

    def _made(self) -> torch.optim.Optimizer:
        """A new optimizer of the runs, which remembers nothing."""
        return self._factory(
            [{"params": self._members(group), **_plain(self._options.param_groups[group])} for group in self._groups]
        )

    def _members(self, group: int) -> list[Tensor]:
        return [value for run, value in self._runs.items() if run.group == group]

    def step(self, factor: float, unused: Collection[str] = NONE_UNUSED) -> None:
        """Update the master with the gradient times `factor`, but for the parameters without a gradient.

        As in torch, those are left alone: no decay, no momentum, no count of steps.
        """
        if self._optimizer is None:
            return
        for own, group in zip(self._optimizer.param_groups, self._groups, strict=True):
            own.update(_plain(self._options.param_groups[group]))
        still = [slot for slot in self.unit.slots if slot.name in unused]
        if still:
            self._cut_out(still)
        left_alone = [self.unit.owned_part(slot.start, slot.stop) for slot in still]
        gradient = self.unit.gradient.owned
        for run, value in self._runs.items():
            if any(part.start <= run.start < part.stop for part in left_alone):
                continue
            value.grad = _scaled(gradient[run.part], value, factor)
            self._optimizer.step()
            value.grad = None
            self.unit.publish(run.part)

    def _cut_out(self, slots: Sequence[Slot]) -> None:
        """Make these parameters runs of their own, for they have a history of their own from now on."""
        assert self._optimizer is not None
        parts = [self.unit.owned_part(slot.start, slot.stop) for slot in slots]
        borders = {border for part in parts for border in (part.start, part.stop)}
        pieces = {run: run.cut_at(borders) for run in self._runs}
        if all(len(cut) == 1 for cut in pieces.values()):
            return
        state = self._optimizer.state
        runs: dict[Run, Tensor] = {}
        for run, value in self._runs.items():
            remembered = state.pop(value, {})
            for piece in pieces[run]:
                runs[piece] = self.unit.master[piece.part]
                if remembered:
                    part = slice(piece.start - run.start, piece.stop - run.start)
                    state[runs[piece]] = {key: _part(known, value, part) for key, known in remembered.items()}
        self._runs = runs
        for own, group in zip(self._optimizer.param_groups, self._groups, strict=True):
            own["params"] = self._members(group)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that have one number per parameter: the live optimizer's, and the separate master."""
        return self.unit.master_bytes + sum(
            state.numel() * state.element_size()
            for _, value, states in self._states()
            for state in states.values()
            if isinstance(state, Tensor) and state.shape == value.shape
        )

    def _states(self) -> Iterator[tuple[Run, Tensor, Mapping[str, Any]]]:
        if self._optimizer is not None:
            for run, value in self._runs.items():
                yield run, value, self._optimizer.state.get(value, {})

    # --- what is remembered, by parameter --------------------------------------------------------------------------

    def export(self, remembered: Remembered) -> Mapping[str, Mapping[str, Tensor]]:
        """What is remembered of every parameter, by name and key; all ranks must call it, and receive all.

        Of numbers per element in the parameter's shape, of one for all a scalar. A parameter that was never stepped has
        nothing.
        """
        keys = (*remembered.once, *remembered.each)
        found: dict[str, dict[str, Tensor]] = {slot.name: {} for slot in self.unit.slots}
        for key, numbers in zip(keys, self._known(keys), strict=True):
            whole = self._collect(key, remembered.each[key]) if key in remembered.each else None
            for slot, number in zip(self.unit.slots, numbers, strict=True):
                if number.isfinite():
                    found[slot.name][key] = number if whole is None else whole[slot.start : slot.stop].view(slot.shape)
        return found

    def _known(self, keys: Sequence[str]) -> Tensor:
        """For each key and slot what is remembered once, 0 for numbers per element, minus infinity where nothing is.

        float64 (keys, slots).
        """
        unit = self.unit
        known = torch.full((len(keys), len(unit.slots)), -torch.inf, dtype=torch.float64, device=unit.setting.device)
        for run, value, states in self._states():
            for number, slot in enumerate(unit.slots):
                part = unit.owned_part(slot.start, slot.stop)
                if max(part.start, run.start) < min(part.stop, run.stop):
                    for row, key in enumerate(keys):
                        if (state := states.get(key)) is not None:
                            each = isinstance(state, Tensor) and state.shape == value.shape and state.ndim > 0
                            known[row, number] = 0.0 if each else float(state)
        if unit.setting.sharding.optimizer:
            unit.shards.all_reduce(known, label="export", reduction=Reduction.MAX)
        return known

    def _collect(self, key: str, like: Tensor) -> Tensor:
        """What the ranks remember per element under `key`; zero where they do not."""
        owned = torch.zeros(self.unit.master.numel(), dtype=like.dtype, device=like.device)
        for run, _, states in self._states():
            if states.get(key) is not None:
                owned[run.part] = states[key]
        return self.unit.collect(owned)

    def restore(self, remembered: Remembered, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Remember this of every parameter, by name and key, as `export` gave it; of others nothing."""
        if self._optimizer is None:
            return
        self._cut_out(self.unit.slots)
        self._optimizer = self._made()
        for run, value in self._runs.items():
            slot = next(slot for slot in self.unit.slots if self._holds(slot, run))
            known = states.get(slot.name)
            if not known:
                continue
            begin = run.start + self.unit.owned_begin - slot.start
            self._optimizer.state[value] = {
                key: value_of.reshape(-1)[begin : begin + value.numel()].to(like.device, like.dtype, copy=True)
                for key, value_of in known.items()
                if (like := remembered.each.get(key)) is not None
            } | {key: remembered.as_once(key, known[key]) for key in known if key in remembered.once}

    def _holds(self, slot: Slot, run: Run) -> bool:
        part = self.unit.owned_part(slot.start, slot.stop)
        return bool(part.start <= run.start and run.stop <= part.stop)


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group."""
    return {key: value for key, value in group.items() if key != "params"}


def _part(known: Any, whole: Tensor, part: slice) -> Any:
    """A part of what was remembered for `whole`: of numbers per element its own, of one for all a copy."""
    if not isinstance(known, Tensor):
        return known
    return known[part] if known.shape == whole.shape else known.clone()


def _scaled(gradient: Tensor, value: Tensor, factor: float) -> Tensor:
    """A run's gradient where its master is and in its dtype, times `factor`; in place if that is where it lies."""
    if value.dtype == gradient.dtype and value.device == gradient.device:
        return gradient if factor == 1 else gradient.mul_(factor)
    moved = gradient.to(value.device, value.dtype)
    return moved if factor == 1 else moved.mul_(factor)


class ShardedOptimizer:
    """Steps what this rank owns of all `units` with optimizers that `factory` makes.

    Args:
        units: frozen ones are left alone.
        factory: called with parameter groups, which it may change; it must make the same optimizer whenever it is.
        groups: the options by which the optimizer's groups differ; slots of units name them by their place here.

    Raises:
        ValueError: the optimizer does not work element by element.
    """

    def __init__(
        self, units: Sequence[Unit], factory: OptimizerFactory, groups: Sequence[Mapping[str, Any]] = ({},)
    ) -> None:
        self.units = [unit for unit in units if unit.trainable]
        assert self.units, "nothing is trained"
        like = self.units[0].master
        require_elementwise(factory, groups, like.dtype, like.device)
        self._remembered = Remembered.by(factory, groups, like)
        self.options = factory([{"params": [like.new_zeros(0)], **group} for group in groups])
        self._optimizers = [UnitOptimizer(unit, factory, self.options) for unit in self.units]

    def square_norm(self, counted: Callable[[Unit], bool]) -> Tensor:
        """Sum of squares of the unique gradient elements this rank answers for, a float64 scalar.

        `counted` leaves out units that another stage answers for (replicas of a tied parameter). Summed over all
        ranks it is the square of the norm of the whole model's gradient, every element once.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.units[0].setting.device)
        for unit in filter(counted, self.units):
            for chunk in unit.unique_gradients():
                wide = torch.promote_types(chunk.dtype, torch.float32)
                total += torch.linalg.vector_norm(chunk, dtype=wide).double() ** 2
            for chunk in unit.replicated_gradients():
                total += 0 * trace(chunk)  # nothing, but that is not a number where the chunk is not finite
        return total

    def set_learning_rate(self, learning_rate: float) -> None:
        """The same one in all groups."""
        for group in self.options.param_groups:
            group["lr"] = learning_rate

    def step(self, factor: float, unused: Collection[str] = NONE_UNUSED) -> None:
        """Update everything owned with its gradient times `factor` (clipping, and undoing the loss scale).

        `unused` are the names of parameters that no rank has a gradient for.
        """
        for optimizer in self._optimizers:
            optimizer.step(factor, unused)
        self.options.step()  # owns nothing; a learning-rate scheduler wants to see it happen

    def finish(self) -> None:
        """End the step, taken or skipped: gradients start at zero again, and what was updated must be gathered."""
        for unit in self.units:
            unit.gradient.clear()
            unit.stepped()

    def export(self) -> Iterator[tuple[UnitOptimizer, Mapping[str, Mapping[str, Tensor]]]]:
        """What is remembered, unit by unit; see `UnitOptimizer.export`."""
        for optimizer in self._optimizers:
            yield optimizer, optimizer.export(self._remembered)

    def restore(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Remember what `export` gave, by the names of parameters.

        Raises:
            ValueError: another optimizer gave it. Nothing has been changed then.
        """
        self._remembered.require(states)
        for optimizer in self._optimizers:
            optimizer.restore(self._remembered, states)

    @property
    def state_bytes(self) -> int:
        """Measured bytes of all optimizer states, masters included."""
        return sum(optimizer.state_bytes for optimizer in self._optimizers)
