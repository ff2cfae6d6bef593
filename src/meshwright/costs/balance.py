"""The balanced cut: layers into contiguous parts so that the heaviest part is as light as it can be.

Exact, not a heuristic, and never with an empty part (GPipe, section 2.2, minimises the variance; the slowest stage is
what a pipeline waits for, so the maximum comes first here and the variance second). Costs may be FLOPs, seconds or
bytes; the function knows no layers and no stages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite, lcm


def balance(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """The bounds of the best cut: part i is costs[bounds[i]:bounds[i+1]], never empty; parts + 1 bounds.

    Best is: the least maximum of the parts' sums; among those the least sum of squares; among those the smaller parts
    first, since the first stages of a pipeline hold the most micro-batches. Raises ValueError for fewer than one
    part, for more parts than costs, and for costs that are negative or not finite.
    """
    if not 1 <= parts <= len(costs):
        raise ValueError(
            f"{len(costs)} layers cannot be cut into {parts} stages of at least one each; take 1 to {len(costs)} stages"
        )
    for index, cost in enumerate(costs):
        if not isfinite(cost) or cost < 0:
            raise ValueError(f"layer {index} costs {cost}; costs must be finite and not negative")
    sums = _exact_sums(costs)
    return _least_squares(sums, parts, _least_maximum(sums, parts))


def _exact_sums(costs: Sequence[float]) -> list[int]:
    """Sums of the first 0, 1, ... costs in whole units, so that equal parts compare equal whatever the floats."""
    exact = [Fraction(cost) for cost in costs]
    unit = lcm(*(cost.denominator for cost in exact))
    return list(accumulate((int(cost * unit) for cost in exact), initial=0))


def _least_maximum(sums: list[int], parts: int) -> int:
    """The least limit under which `parts` parts are enough: a bisection, each limit tried by filling greedily.

    Fewer parts than allowed are fine here: cutting one of them further never raises the maximum.
    """
    low, high = max(b - a for a, b in pairwise(sums)), sums[-1]
    while low < high:
        limit = (low + high) // 2
        if _parts_under(sums, limit) <= parts:
            high = limit
        else:
            low = limit + 1
    return low


def _parts_under(sums: list[int], limit: int) -> int:
    """How many parts a greedy fill needs when none may exceed `limit` (at least the largest cost)."""
    count, start = 0, 0
    while start < len(sums) - 1:
        # The furthest end whose part still fits; zero costs behind it come along.
        start = bisect_left(sums, sums[start] + limit + 1) - 1
        count += 1
    return count


def _least_squares(sums: list[int], parts: int, limit: int) -> tuple[int, ...]:
    """The cut with the least sum of squares among those without a part above `limit` (dynamic programming)."""
    items = len(sums) - 1
    # best[i]: the least sum of squares of cutting the items from i on into as many parts as rounds have passed; None
    # where it cannot be done. first_end[k][i]: where the first of k + 1 parts ends then, the smallest such end.
    best: list[int | None] = [(sums[-1] - here) ** 2 if sums[-1] - here <= limit else None for here in sums[:-1]]
    best.append(None)
    first_end: list[list[int]] = [[items] * items]
    for _ in range(1, parts):
        longer: list[int | None] = [None] * (items + 1)
        ends = [items] * items
        for start in range(items):
            for end in range(start + 1, items):
                size = sums[end] - sums[start]
                if size > limit:
                    break
                rest = best[end]
                if rest is None:
                    continue
                total = size * size + rest
                known = longer[start]
                if known is None or total < known:
                    longer[start], ends[start] = total, end
        best = longer
        first_end.append(ends)
    bounds = [0]
    for ends in reversed(first_end):
        bounds.append(ends[bounds[-1]])
    return tuple(bounds)
