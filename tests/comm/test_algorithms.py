"""The table of gloo's algorithms: well formed, and read as it says."""

from __future__ import annotations

from itertools import pairwise

import pytest

from meshwright.comm.algorithms import TABLE, Algorithm, Choice, candidates, choose
from meshwright.comm.ledger import Kind

SMALL = (
    Choice(Kind.ALL_GATHER, 2, 0, Algorithm.MESSAGES),
    Choice(Kind.ALL_GATHER, 2, 1000, Algorithm.BROADCASTS),
    Choice(Kind.ALL_GATHER, 4, 0, Algorithm.ALL_TO_ALL),
)


@pytest.mark.parametrize(
    ("payload", "ranks", "algorithm"),
    [
        (0, 2, Algorithm.MESSAGES),
        (999, 2, Algorithm.MESSAGES),
        (1000, 2, Algorithm.BROADCASTS),
        (10**9, 3, Algorithm.BROADCASTS),
        (10**9, 4, Algorithm.ALL_TO_ALL),
        (10**9, 64, Algorithm.ALL_TO_ALL),
    ],
)
def test_the_last_row_that_fits_is_chosen(payload: int, ranks: int, algorithm: Algorithm) -> None:
    assert choose(Kind.ALL_GATHER, payload, ranks, SMALL) is algorithm


@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.BROADCAST, Kind.BARRIER])
def test_what_is_not_in_the_table_is_gloos_own(kind: Kind) -> None:
    assert choose(kind, 1000, 2, SMALL) is Algorithm.NATIVE


def test_the_table_is_in_order_without_repetitions_and_starts_at_nothing() -> None:
    for kind in {choice.kind for choice in TABLE}:
        rows = [choice for choice in TABLE if choice.kind is kind]
        assert [(row.ranks, row.least) for row in rows] == sorted({(row.ranks, row.least) for row in rows})
        for ranks in {row.ranks for row in rows}:
            of_ranks = [row for row in rows if row.ranks == ranks]
            assert of_ranks[0].least == 0
            assert all(row.algorithm in candidates(kind) for row in of_ranks)
            algorithms = [row.algorithm for row in of_ranks]
            assert all(one is not other for one, other in pairwise(algorithms))
