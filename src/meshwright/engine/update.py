"""The end of every step: clip the gradient by its norm and update the weights, or skip and say why.

Every rank has the same norm, so all decide the same: a gradient that is not finite changes no weight, no moment and no
count of steps anywhere, and only the loss scale learns from it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from meshwright.comm.connect import Groups
from meshwright.engine.fault import Fault, find_fault
from meshwright.parallel.precision import LossScale
from meshwright.parallel.unit import Unit
from meshwright.parallel.zero import NONE_UNUSED, ShardedOptimizer


@dataclass(frozen=True)
class Outcome:
    """The norm of the whole gradient before clipping; and, if the weights were left alone, why."""

    norm: float
    fault: Fault | None


class Update:
    """Steps `optimizer`, whose trained units stand in `units` by their place in the forward pass of the whole model."""

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        units: Mapping[int, Unit],
        groups: Groups,
        loss_scale: LossScale,
        clip: float | None,
    ) -> None:
        self._optimizer = optimizer
        self._units = units
        self._groups = groups
        self._loss_scale = loss_scale
        self._clip = clip

    def finish(self, square: float, unscale: float, unused: Collection[str] = NONE_UNUSED) -> Outcome:
        """Use the reduced gradients, whose squares sum to `square` over the whole model, times `unscale`.

        `unused` are the parameters that no rank has a gradient for. Every rank must call it, with the same values.
        """
        norm = math.sqrt(square) * unscale if square >= 0 else math.nan
        fault = None
        if math.isfinite(norm):
            self._optimizer.step(self._clip_factor(norm) * unscale, unused)
        else:
            fault = find_fault(self._units, self._groups.world, self._groups.device)
        self._loss_scale.update(fault is None)
        self._optimizer.finish()
        return Outcome(norm, fault)

    def _clip_factor(self, norm: float) -> float:
        # The small term is torch's (clip_grad_norm_), so that the weights are too.
        return 1.0 if self._clip is None else min(1.0, self._clip / (norm + 1e-6))
