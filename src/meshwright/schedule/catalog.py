"""The schedules we know, as functions of a few ints; every stage has a rank of its own.

GPipe (Huang et al., 2019, figure 2c) runs all forwards, then all backwards: m micro-batches in flight. 1F1B (Narayanan
et al., 2021, figure 4; PipeDream-Flush) alternates as early as it can: the same bubble, but at most p micro-batches in
flight. For p=2, m=3, with backwards twice as long:

    gpipe  0: F0 F1 F2 ·  ·  ·  B0─── B1─── B2───      1f1b  0: F0 F1 ·  ·  B0─── F2 B1─── ·  B2───
           1: ·  F0 F1 F2 B0─── B1─── B2─── ·  ·             1: ·  F0 B0─── F1 B1─── F2 B2─── ·  ·

Neither knows of messages, times or layers. Backwards go in the order of the forwards on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import assert_never

from meshwright.layout.layout import ScheduleName
from meshwright.schedule.op import Kind, Op
from meshwright.schedule.schedule import Schedule


def _all(kind: Kind, stage: int, micro_batches: int) -> tuple[Op, ...]:
    return tuple(Op(kind, micro_batch, stage) for micro_batch in range(micro_batches))


def forward_only(stages: int, micro_batches: int) -> Schedule:
    """Forwards and nothing else: evaluation."""
    ranks = tuple(_all(Kind.FORWARD, stage, micro_batches) for stage in range(stages))
    return Schedule("forward-only", stages, micro_batches, ranks)


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards."""
    ranks = tuple(
        (*_all(Kind.FORWARD, stage, micro_batches), *_all(Kind.BACKWARD, stage, micro_batches))
        for stage in range(stages)
    )
    return Schedule(str(ScheduleName.GPIPE), stages, micro_batches, ranks)


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """A warm-up of forwards, then one forward and one backward in turn, then the rest of the backwards.

    Fewer micro-batches than stages is legal: the warm-up is then all there is.
    """

    def ops(stage: int) -> Iterator[Op]:
        # The first backward reaches this stage after stages-1-stage more forwards went ahead of it.
        warm_up = min(stages - 1 - stage, micro_batches)
        for micro_batch in range(warm_up):
            yield Op(Kind.FORWARD, micro_batch, stage)
        for micro_batch in range(micro_batches):
            if warm_up + micro_batch < micro_batches:
                yield Op(Kind.FORWARD, warm_up + micro_batch, stage)
            yield Op(Kind.BACKWARD, micro_batch, stage)

    ranks = tuple(tuple(ops(stage)) for stage in range(stages))
    return Schedule(str(ScheduleName.ONE_F_ONE_B), stages, micro_batches, ranks)


def build(name: ScheduleName, stages: int, micro_batches: int) -> Schedule:
    """The schedule that a layout asks for."""
    match name:
        case ScheduleName.GPIPE:
            return gpipe(stages, micro_batches)
        case ScheduleName.ONE_F_ONE_B:
            return one_f_one_b(stages, micro_batches)
        case _:
            assert_never(name)


def bubble(stages: int, micro_batches: int) -> Fraction:
    """The idle part of a pipeline of equal stages, GPipe's and 1F1B's alike: (p-1)/(m+p-1) (GPipe, section 2.3)."""
    return Fraction(stages - 1, micro_batches + stages - 1)
