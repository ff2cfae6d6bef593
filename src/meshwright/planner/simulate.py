"""The simulator: a schedule and a duration per op -> the timeline of a run in which nothing else takes time.

Messages are instant and ranks never hesitate: an op starts as soon as its rank is free and what it `needs` is done.
With forwards and backwards of equal cost on every stage the bubble is (p-1)/(m+p-1) (GPipe, section 2.3; Narayanan et
al., 2021, section 2.2).
"""

from __future__ import annotations

from collections.abc import Callable

from meshwright.schedule.op import Op, needs
from meshwright.schedule.schedule import Schedule
from meshwright.schedule.timeline import Number, Span, Timeline


def simulate(schedule: Schedule, seconds: Callable[[Op], Number]) -> Timeline:
    """When each op runs if it takes `seconds(op)`: spans by rank, in order; exact for ints and Fractions.

    Raises ValueError for a schedule that cannot run.
    """
    schedule.check()
    finished: dict[Op, Number] = {}
    free: list[Number] = [0] * len(schedule.ranks)
    spans: list[Span] = []
    for op in schedule.in_order():
        rank = schedule.rank_of(op.stage)
        start = max((free[rank], *(finished[need] for need in needs(op, schedule.stages))))
        finished[op] = free[rank] = start + seconds(op)
        spans.append(Span(rank, str(op), start, finished[op]))
    return Timeline(tuple(sorted(spans, key=lambda span: (span.rank, span.start))))
