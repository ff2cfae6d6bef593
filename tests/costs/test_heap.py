"""The model of a contiguous address space: its two policies, and what is left free."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costs.heap import Fit, Heap, Hole

K = 512


def with_holes(fit: Fit) -> Heap:
    """Alive 1, free 3, alive 1, free 1, alive 1 (in units of the alignment)."""
    heap = Heap(fit)
    blocks = [heap.take(size * K) for size in (1, 3, 1, 1, 1)]
    heap.give(blocks[1])
    heap.give(blocks[3])
    return heap


def test_first_fit_takes_the_lowest_hole_and_best_fit_the_smallest() -> None:
    assert with_holes(Fit.FIRST).take(K) == 1 * K
    assert with_holes(Fit.BEST).take(K) == 5 * K


@pytest.mark.parametrize("fit", Fit)
def test_what_fits_in_no_hole_makes_the_space_larger_although_enough_is_free(fit: Fit) -> None:
    heap = with_holes(fit)
    assert heap.take(4 * K) == 7 * K
    assert (heap.alive, heap.top, heap.needed) == (7 * K, 11 * K, 11 * K)


def test_neighbouring_holes_become_one_and_the_last_one_lowers_the_top() -> None:
    heap = Heap(Fit.FIRST)
    blocks = [heap.take(K) for _ in range(4)]
    for index in (0, 2, 1):
        heap.give(blocks[index])
    assert list(heap.holes(4 * K)) == [Hole(0, 3 * K)]
    heap.give(blocks[3])
    assert (heap.alive, heap.top, heap.needed) == (0, 0, 4 * K)
    assert heap.fragmentation(4 * K) == 0


def test_fragmentation_is_what_the_largest_hole_lacks_of_all_that_is_free() -> None:
    heap = with_holes(Fit.FIRST)
    assert heap.fragmentation(7 * K) == 1 - 3 / 4
    assert heap.fragmentation(13 * K) == 1 - 6 / 10
    assert Heap(Fit.FIRST).fragmentation(0) == 0


def test_a_block_that_is_not_there_cannot_be_freed() -> None:
    with pytest.raises(KeyError):
        with_holes(Fit.FIRST).give(K)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 9)), max_size=60), st.sampled_from(Fit))
def test_blocks_never_overlap_and_holes_are_the_rest(requests: list[tuple[int, int]], fit: Fit) -> None:
    heap, alive = Heap(fit), dict[int, int]()
    for nbytes, frees in requests:
        for address in list(alive)[: max(0, frees - 5)]:
            heap.give(address)
            del alive[address]
        alive[heap.take(nbytes)] = max(-(-nbytes // K), 1) * K
        spans = sorted([(at, at + size) for at, size in alive.items()] + [(h.start, h.stop) for h in heap.holes(0)])
        assert [begin for begin, _ in spans] == [0, *[end for _, end in spans[:-1]]]
        assert spans[-1][1] == heap.top <= heap.needed
        assert heap.alive == sum(alive.values())
