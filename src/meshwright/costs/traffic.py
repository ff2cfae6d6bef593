"""What the papers say is sent: elements per rank and step, to be held against the ledger of a run.

With ring (or equally good) collectives a rank sends (n-1)/n of a tensor for a reduce-scatter or an all-gather over n
ranks, and twice that for an all-reduce. The formulas name no bytes and no seconds, and count no padding.
"""

from __future__ import annotations

from fractions import Fraction

from meshwright.layout.zero import ZeroStage, row


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
