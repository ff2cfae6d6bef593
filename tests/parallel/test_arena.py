"""Arenas: memory is asked for once, in one piece, whatever is taken and given back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.parallel.arena import ALIGNMENT, Arena, Arenas

CPU = torch.device("cpu")


def places(slots: list[Tensor]) -> list[int]:
    return sorted(slot.data_ptr() for slot in slots)


def test_reserved_slots_lie_side_by_side_in_order_and_no_more_memory_is_asked_for() -> None:
    arena = Arena(1024, CPU)
    for _ in range(4):
        arena.reserve(5)
        slots = [arena.take() for _ in range(5)]
        assert places(slots) == [places(slots)[0] + 1024 * index for index in range(5)]
        for slot in slots:
            arena.give(slot)
    assert (arena.made, arena.used, arena.blocks) == (5, 0, 1)
    assert arena.held_bytes == 5 * 1024


def test_what_is_missing_beside_the_free_slots_is_made_in_one_block() -> None:
    arena = Arena(1024, CPU)
    arena.reserve(3)
    arena.take()
    arena.reserve(6)
    assert (arena.made, arena.blocks) == (7, 2)
    for _ in range(8):
        arena.take()
    assert (arena.made, arena.blocks) == (9, 4)


@given(st.lists(st.booleans(), max_size=40))
def test_slots_that_are_taken_never_overlap(takes: list[bool]) -> None:
    arena = Arena(ALIGNMENT, CPU)
    taken: list[Tensor] = []
    most = 0
    for number, take in enumerate(takes):
        if take:
            taken.append(arena.take().fill_(number % 251))
            taken[-1].number = number % 251  # type: ignore[attr-defined]
        elif taken:
            arena.give(taken.pop(0))
        most = max(most, len(taken))
        assert all(bool((slot == slot.number).all()) for slot in taken)  # type: ignore[attr-defined]
    assert arena.made == most


def test_writing_a_slot_does_not_change_what_autograd_saved_of_another_or_of_its_last_use() -> None:
    arena = Arena(1024, CPU)
    arena.reserve(2)  # both are parts of one block
    first, second = arena.take(), arena.take()
    x = first.view(torch.float32).fill_(3.0).requires_grad_()
    y = (x * x).sum()
    second.view(torch.float32).fill_(5.0)
    y.backward()
    assert x.grad is not None
    assert bool((x.grad == 6).all())


def test_things_of_one_size_share_an_arena_and_so_do_slightly_smaller_ones() -> None:
    arenas = Arenas(CPU)
    large = arenas.fitting(3000)
    assert large.slot_bytes == 3072
    assert arenas.fitting(3072) is large
    assert arenas.fitting(1537) is large
    assert arenas.fitting(1536) is large
    assert arenas.fitting(1024) is not large


def test_an_arena_that_became_too_small_gives_its_memory_back_when_nobody_uses_it() -> None:
    arenas = Arenas(CPU)
    for size in (1000, 2000, 3000, 4000):  # longer samples from step to step
        arena = arenas.fitting(size)
        arena.give(arena.take())
    assert arenas.held_bytes == 4096
    used = arenas.fitting(4000).take()
    arenas.fitting(9000).take()
    assert arenas.held_bytes == 4096 + 9216
    del used


@pytest.mark.parametrize("sizes", [(8000, 500), (500, 8000)])
def test_shapes_that_alternate_ask_for_memory_once(sizes: tuple[int, int]) -> None:
    arenas = Arenas(CPU)
    for _ in range(3):
        slots = [(arena, arena.take()) for arena in map(arenas.fitting, sizes)]
        for arena, slot in slots:
            arena.give(slot)
    assert arenas.blocks == 2


def test_nothing_at_all_can_be_kept_too() -> None:
    arenas = Arenas(CPU)
    slot = arenas.fitting(0).take()
    assert slot[:0].view(torch.float64).view(0, 4).shape == (0, 4)
