"""A permutation of any number of places that is named by a key and never stored.

Not cryptography: the key is a seed. It is there so that sample number 10^9 can be asked for without drawing those
before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def permute(place: int, size: int, key: str) -> int:
    """Where `place` goes in the permutation of 0 ... size-1 that `key` names; nothing is stored.

    A Feistel network permutes the next power of four, whatever its round function is. Its values beyond `size` are
    walked over: following the permutation from a number below `size` must come back below it (cycle walking; Black
    and Rogaway, 2002, method 2). Expected steps: fewer than four.
    """
    assert 0 <= place < size, (place, size)
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(key.encode(), digest_size=48).digest()
    rounds = [int.from_bytes(digest[start : start + 8], "little") for start in range(0, 48, 8)]
    while True:
        place = _feistel(place, half, rounds)
        if place < size:
            return place


def _feistel(value: int, half: int, rounds: Iterable[int]) -> int:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for key in rounds:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << half | right


def _mix(value: int) -> int:
    """The finaliser of splitmix64: each bit of the 64 depends on all of them."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31
