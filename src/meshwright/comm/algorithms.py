"""Which algorithm carries out a collective on gloo: a table of measured choices, read by kind, bytes and ranks.

Data and one function. How each algorithm works is `recipes.py`; what each costs is measured by
`benchmarks/gloo_algorithms.py`, which prints this table anew. NCCL chooses for itself, and shared memory has one way.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshwright.comm.ledger import Kind


class Algorithm(StrEnum):
    """A way to carry out a collective.

    NATIVE: gloo's own. ALL_TO_ALL: one all-to-all, and a sum on each rank. MESSAGES: everybody sends to everybody what
    the other needs, and sums. BROADCASTS: one broadcast from each rank.
    """

    NATIVE = "native"
    ALL_TO_ALL = "all-to-all"
    MESSAGES = "messages"
    BROADCASTS = "broadcasts"


def candidates(kind: Kind) -> tuple[Algorithm, ...]:
    """What there is to choose from; a broadcast and a barrier have gloo's own only."""
    match kind:
        case Kind.ALL_REDUCE:
            return (Algorithm.NATIVE, Algorithm.MESSAGES)
        case Kind.REDUCE_SCATTER:
            return (Algorithm.NATIVE, Algorithm.ALL_TO_ALL, Algorithm.MESSAGES)
        case Kind.ALL_GATHER:
            return (Algorithm.NATIVE, Algorithm.ALL_TO_ALL, Algorithm.MESSAGES, Algorithm.BROADCASTS)
        case _:
            return (Algorithm.NATIVE,)


@dataclass(frozen=True)
class Choice:
    """The quickest algorithm of `kind` from `ranks` ranks and `least` bytes (of the whole tensor) upwards."""

    kind: Kind
    ranks: int
    least: int
    algorithm: Algorithm


_KIB, _MIB = 1 << 10, 1 << 20

TABLE = (
    Choice(Kind.ALL_REDUCE, 2, 0, Algorithm.MESSAGES),
    Choice(Kind.ALL_REDUCE, 2, 1 * _MIB, Algorithm.NATIVE),
    # On one machine messages stay ahead up to 1 MB; but they send n/2 times as much, which a network would feel.
    Choice(Kind.ALL_REDUCE, 4, 0, Algorithm.MESSAGES),
    Choice(Kind.ALL_REDUCE, 4, 256 * _KIB, Algorithm.NATIVE),
    Choice(Kind.REDUCE_SCATTER, 2, 0, Algorithm.ALL_TO_ALL),
    Choice(Kind.ALL_GATHER, 2, 0, Algorithm.MESSAGES),
    Choice(Kind.ALL_GATHER, 2, 1 * _MIB, Algorithm.BROADCASTS),
    Choice(Kind.ALL_GATHER, 4, 0, Algorithm.MESSAGES),
    Choice(Kind.ALL_GATHER, 4, 4 * _MIB, Algorithm.BROADCASTS),
    Choice(Kind.ALL_GATHER, 8, 0, Algorithm.BROADCASTS),
)
"""Measured in float32 on 2, 4 and 8 ranks of a machine with two cores; bfloat16 would lead to the same choice.

Of one kind, more ranks stand below fewer, and more bytes below fewer.
"""


def choose(kind: Kind, payload: int, ranks: int, table: tuple[Choice, ...] = TABLE) -> Algorithm:
    """The algorithm for a collective over `payload` bytes (of the whole tensor, not the shard) on `ranks` ranks.

    Numbers of ranks that were not measured are served as the next smaller one that was.
    """
    fitting = [choice for choice in table if choice.kind is kind and choice.ranks <= ranks and choice.least <= payload]
    return max(fitting, key=lambda choice: (choice.ranks, choice.least)).algorithm if fitting else Algorithm.NATIVE
