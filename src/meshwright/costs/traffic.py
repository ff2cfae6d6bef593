"""What the papers say is sent: elements per rank and step, to be held against the ledger of a run.

With ring (or equally good) collectives a rank sends (n-1)/n of a tensor for a reduce-scatter or an all-gather over n
ranks, and twice that for an all-reduce. The formulas name no bytes and no seconds, and count no padding.

Where states are divided over s ranks only and replicated r times (HSDP), most of it stays inside a node:

      between the s ranks of a run      what ZeRO sends over s ranks instead of d       the fast link
      between the r replicas            2 Ψ/s (r-1)/r      all-reduce of the own part   the slow link, once a step
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from meshwright.layout.layout import Layout
from meshwright.layout.zero import ZeroStage, row


@dataclass(frozen=True)
class Traffic:
    """Elements that one rank sends per step for data parallelism: to the ranks of its run, and to its replicas."""

    shards: Fraction
    replicas: Fraction

    @property
    def total(self) -> Fraction:
        """Both together."""
        return self.shards + self.replicas


def of_layout(parameters: int, layout: Layout) -> Traffic:
    """What a layout sends along the data axis for Ψ = `parameters` on each rank of its pipeline and tensor axes.

    Over s = `layout.shards` ranks as `data_parallel` says; then each rank sums its part of the gradient over r =
    `layout.replicas` ranks. Offload sends nothing to other ranks.
    """
    s, r = layout.shards, layout.replicas
    return Traffic(
        shards=data_parallel(parameters, s, layout.effective_zero, layout.micro_batches),
        replicas=Fraction(2 * parameters * (r - 1), s * r),
    )


def data_parallel(parameters: int, data: int, stage: ZeroStage, micro_batches: int = 1) -> Fraction:
    """Elements that one of d = `data` ranks sends per step for Ψ = `parameters` (ZeRO, section 7).

        stage 0     2Ψ (d-1)/d               all-reduce, once
        stage 1     (1 + 1) Ψ (d-1)/d        reduce-scatter once, all-gather of the updated weights once
        stage 2     (m + 1) Ψ (d-1)/d        reduce-scatter with each micro-batch, all-gather once
        stage 3     3m Ψ (d-1)/d             with each micro-batch: all-gather forward and backward, reduce-scatter

    A full recompute changes nothing: its gather serves the backward too.
    """
    sharding = row(stage)
    reductions = micro_batches if sharding.gradients else 1
    if not sharding.optimizer:
        passes = 2
    elif sharding.parameters:
        passes = reductions + 2 * micro_batches
    else:
        passes = reductions + 1
    return Fraction(passes * parameters * (data - 1), data)
