"""The nearest thing that works, for the messages of ValueErrors.

Not a spelling checker and not number theory: three helpers, so that every message ends with a remedy in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest_word(word: str, options: Iterable[str]) -> str:
    """The one of `options` (at least one) that is spelled most like `word`; case does not count."""
    spellings = {option.lower(): option for option in options}
    return spellings[get_close_matches(word.lower(), spellings, n=1, cutoff=0.0)[0]]


def nearest_divisors(number: int, wanted: int) -> tuple[int, ...]:
    """The divisors of `number` (>= 1) around `wanted`: the largest not above it and the smallest not below it.

    One of the two where they coincide or where there is no divisor on one side.
    """
    divisors = [candidate for candidate in range(1, number + 1) if number % candidate == 0]
    below = [divisor for divisor in divisors if divisor <= wanted][-1:]
    above = [divisor for divisor in divisors if divisor >= wanted][:1]
    return tuple(dict.fromkeys(below + above))


def one_of(values: Iterable[object]) -> str:
    """The values as a choice: "2 or 4", "1, 2 or 4"."""
    words = [str(value) for value in values]
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
