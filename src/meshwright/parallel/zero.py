"""The sharded optimizer: one torch optimizer over the pieces of every unit that this rank owns (ZeRO, section 5).

Clipping by the global norm and the step itself happen on flat runs of memory, at most two per unit, so a fused
optimizer does them in a few kernels. Nothing here knows the ZeRO stage: a unit says what it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.unit import Piece, Unit

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes a torch optimizer from parameter groups; each has "params" and "decay" (bool, whether weight decay applies)."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over many elements are kept in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


class ShardedOptimizer:
    """Steps the owned pieces of `units` with the optimizer that `factory` makes."""

    def __init__(self, units: Sequence[Unit], factory: OptimizerFactory) -> None:
        self.units = units
        self._pieces = [piece for unit in units for piece in unit.pieces()]
        groups = [self._group(decay) for decay in (True, False) if any(p.decay is decay for p in self._pieces)]
        # A rank whose shards are padding only owns nothing and has nothing to step.
        self._optimizer = factory(groups) if groups else None

    def _group(self, decay: bool) -> dict[str, Any]:
        chosen = [piece for piece in self._pieces if piece.decay is decay]
        return {"params": [self._leaf(piece) for piece in chosen], "decay": decay}

    @staticmethod
    def _leaf(piece: Piece) -> Tensor:
        piece.value.grad = piece.gradient
        return piece.value

    def square_norm(self, counted: Callable[[Unit], bool]) -> Tensor:
        """Sum of squares of the unique gradient elements this rank answers for, a float64 scalar.

        `counted` leaves out units that another stage answers for (replicas of a tied parameter). Summed over all
        ranks it is the square of the norm of the whole model's gradient, every element once.
        """
        runs = [run for unit in self.units if counted(unit) for run in unit.unique_gradients()]
        total = torch.zeros((), dtype=torch.float64, device=self.units[0].owned_gradient.device)
        for run in runs:
            total += torch.linalg.vector_norm(run, dtype=accumulation_dtype(run.dtype)).double() ** 2
        return total

    def scale_gradients(self, factor: float) -> None:
        """Multiply every owned gradient by `factor` (clipping)."""
        for unit in self.units:
            unit.owned_gradient.mul_(factor)

    def step(self, learning_rate: float) -> None:
        """Update the owned values from the owned gradients."""
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()

    def finish(self) -> None:
        """End the step, taken or skipped: gradients start at zero again, and what was updated must be gathered."""
        for unit in self.units:
            unit.clear_gradient()
            unit.stepped()

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer states that have one number per parameter, measured on the live optimizer."""
        if self._optimizer is None:
            return 0
        return sum(
            state.numel() * state.element_size()
            for parameter, states in self._optimizer.state.items()
            for state in states.values()
            if isinstance(state, Tensor) and state.shape == parameter.shape
        )
