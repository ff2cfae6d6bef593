"""The nearest thing that works."""

from __future__ import annotations

from meshwright.layout.nearest import nearest_divisors, nearest_word, one_of


def test_the_nearest_word_is_found_whatever_the_case() -> None:
    assert nearest_word("Micro_batchs", ["macro", "micro_batches", "m"]) == "micro_batches"
    assert nearest_word("ZERO", ["zero", "one"]) == "zero"


def test_the_nearest_divisors_enclose_the_number() -> None:
    assert nearest_divisors(16, 3) == (2, 4)
    assert nearest_divisors(16, 4) == (4,)
    assert nearest_divisors(16, 100) == (16,)
    assert nearest_divisors(7, 0) == (1,)


def test_a_choice_reads_as_a_sentence() -> None:
    assert one_of([4]) == "4"
    assert one_of([2, 4]) == "2 or 4"
    assert one_of([1, 2, 4]) == "1, 2 or 4"
