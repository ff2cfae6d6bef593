"""Which dtypes a run computes and remembers in, and the scaling that keeps float16 gradients representable.

In 16 bits the layers' parameters, activations and gradients take 2 bytes each, and the optimizer updates a float32
master copy with its two float32 moments: 2 + 2 + 12 bytes per parameter with Adam (ZeRO, section 3.1; Micikevicius et
al., 2018). In float32 and float64 the parameters are their own masters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from meshwright.layout.zero import StateBytes


@dataclass(frozen=True)
class Precision:
    """The dtypes of a unit.

    Args:
        compute: of parameters, activations and gradients.
        master: of what the optimizer updates.
        reduce: in which gradients are summed over the ranks, and over micro-batches where they do not persist whole.
    """

    compute: torch.dtype
    master: torch.dtype
    reduce: torch.dtype

    @classmethod
    def of(cls, compute: torch.dtype, reduce: torch.dtype | None = None) -> Self:
        """The usual one: masters in float32 for 16-bit dtypes, and no separate ones otherwise; reduced as computed.

        Raises:
            ValueError: `reduce` cannot hold what `compute` can.
        """
        reduce = reduce or compute
        if torch.promote_types(compute, reduce) != reduce:
            raise ValueError(
                f"gradients in {compute} cannot be reduced in {reduce}, which cannot hold them; "
                f"take {compute} or {torch.promote_types(compute, torch.float32)}"
            )
        # Numbers that are not floating-point are frozen, and nobody updates them.
        master = torch.promote_types(compute, torch.float32) if compute.is_floating_point else compute
        return cls(compute, master, reduce)

    @property
    def mixed(self) -> bool:
        """Whether the optimizer updates a separate copy."""
        return self.master != self.compute

    @property
    def adam_bytes(self) -> StateBytes:
        """Bytes per parameter with Adam: parameter, gradient, and what the optimizer remembers."""
        copies = 3 if self.mixed else 2
        return StateBytes(self.compute.itemsize, self.compute.itemsize, copies * self.master.itemsize)


class LossScale:
    """What the loss is multiplied by before backward, so that small float16 gradients do not become zero.

    Halved whenever a gradient overflowed (that step is skipped), doubled after `patience` good steps in a row. Every
    rank sees the same norm, decides the same, and so has the same scale. Other dtypes need none: it stays 1.
    """

    def __init__(self, compute: torch.dtype, initial: float = 2.0**16, patience: int = 2000) -> None:
        self._dynamic = compute == torch.float16
        self._patience = patience
        self._good = 0
        self.value = initial if self._dynamic else 1.0

    def update(self, finite: bool) -> None:
        """Learn from a step whether its gradient was finite."""
        if not self._dynamic:
            return
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self._good % self._patience == 0:
            self.value *= 2
