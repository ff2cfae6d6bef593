"""The sharded optimizer: a torch optimizer over what this rank owns of every unit (ZeRO, section 5).

Clipping by the global norm and the step itself happen on flat runs of memory, at most two per unit, so a fused
optimizer does them in a few kernels. In mixed precision the gradient of one unit at a time is widened, so the buffer
for it does not grow with the model (C_B). Nothing here knows the ZeRO stage: a unit says what it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.flat import Piece
from meshwright.parallel.unit import Unit

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes a torch optimizer from parameter groups; each has "params" and "decay" (bool, whether weight decay applies)."""


class UnitOptimizer:
    """Steps the pieces of one unit."""

    def __init__(self, unit: Unit, factory: OptimizerFactory) -> None:
        self.unit = unit
        self._pieces = unit.pieces()
        # A rank whose shard is padding only owns nothing and has nothing to step.
        groups = [{"params": [piece.value], "decay": piece.decay} for piece in self._pieces]
        self._optimizer = factory(groups) if groups else None

    def step(self, learning_rate: float, factor: float) -> None:
        """Update the master with the gradient times `factor`."""
        if self._optimizer is None:
            return
        for piece in self._pieces:
            piece.value.grad = _scaled(piece, factor)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        for piece in self._pieces:
            piece.value.grad = None

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that have one number per parameter: the live optimizer's, and the separate master."""
        if self._optimizer is None:
            return self.unit.master_bytes
        return self.unit.master_bytes + sum(
            state.numel() * state.element_size()
            for parameter, states in self._optimizer.state.items()
            for state in states.values()
            if isinstance(state, Tensor) and state.shape == parameter.shape
        )


def _scaled(piece: Piece, factor: float) -> Tensor:
    """The piece's gradient in the dtype of its master, times `factor`; in place where the dtype is the same."""
    if piece.value.dtype != piece.gradient.dtype:
        return piece.gradient.to(piece.value.dtype).mul_(factor)
    return piece.gradient if factor == 1 else piece.gradient.mul_(factor)


class ShardedOptimizer:
    """Steps what this rank owns of all `units` with optimizers that `factory` makes, one for each."""

    def __init__(self, units: Sequence[Unit], factory: OptimizerFactory) -> None:
        self._optimizers = [UnitOptimizer(unit, factory) for unit in units]
        self.units = units

    def square_norm(self, counted: Callable[[Unit], bool]) -> Tensor:
        """Sum of squares of the unique gradient elements this rank answers for, a float64 scalar.

        `counted` leaves out units that another stage answers for (replicas of a tied parameter). Summed over all
        ranks it is the square of the norm of the whole model's gradient, every element once.
        """
        runs = [run for unit in self.units if counted(unit) for run in unit.unique_gradients()]
        total = torch.zeros((), dtype=torch.float64, device=self.units[0].owned_gradient.device)
        for run in runs:
            wide = torch.promote_types(run.dtype, torch.float32)
            total += torch.linalg.vector_norm(run, dtype=wide).double() ** 2
        return total

    def step(self, learning_rate: float, factor: float) -> None:
        """Update everything owned with its gradient times `factor` (clipping, and undoing the loss scale)."""
        for optimizer in self._optimizers:
            optimizer.step(learning_rate, factor)

    def finish(self) -> None:
        """End the step, taken or skipped: gradients start at zero again, and what was updated must be gathered."""
        for unit in self.units:
            unit.clear_gradient()
            unit.stepped()

    @property
    def state_bytes(self) -> int:
        """Measured bytes of all optimizer states, masters included."""
        return sum(optimizer.state_bytes for optimizer in self._optimizers)
