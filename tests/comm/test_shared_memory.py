"""The ground that the shared transport stands on: segments, words, the arena, and other processes' lives."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.comm.shared.arena import ALIGNMENT, Arena
from meshwright.comm.shared.process import Life, Process
from meshwright.comm.shared.segment import Segment

GIB = 2**30


def segment(size: int = GIB) -> tuple[Segment, int]:
    made, file = Segment.create(size)
    return made, file


def test_a_segment_far_larger_than_what_is_used_takes_only_what_is_used() -> None:
    made, file = segment(64 * GIB)
    made.tensor(48 * GIB, 1000, torch.float32).fill_(1.0)
    assert os.fstat(file).st_blocks * 512 <= 64 * 1024
    os.close(file)


def test_another_mapping_of_the_segment_sees_the_same_memory() -> None:
    ours, file = segment()
    theirs = Segment.open(os.getpid(), file, GIB)
    os.close(file)
    tensor = ours.tensor(4096, 10, torch.bfloat16)
    tensor.fill_(2.5)
    assert torch.equal(theirs.tensor(4096, 10, torch.bfloat16), tensor)
    assert ours.offset(tensor[3:]) == 4096 + 6
    assert theirs.offset(tensor) is None
    assert ours.offset(torch.zeros(3)) is None


def test_a_file_that_is_not_the_segment_is_refused() -> None:
    made, file = segment()
    with pytest.raises(OSError, match="is another file"):
        Segment.open(os.getpid(), file, GIB // 2)
    os.close(file)
    with pytest.raises(OSError, match="No such file"):
        Segment.open(os.getpid(), 99_999, GIB)
    del made


def test_a_word_wakes_who_sleeps_on_it() -> None:
    made, file = segment()
    os.close(file)
    made.words.publish(5, 2**32 - 1)
    woken: list[float] = []

    def wait() -> None:
        begun = time.monotonic()
        while made.words.behind(5, 2**32):  # counters run on past what a word holds
            made.words.sleep(5, made.words.load(5), 20.0)
        woken.append(time.monotonic() - begun)

    sleeper = threading.Thread(target=wait)
    sleeper.start()
    time.sleep(0.2)
    made.words.publish(5, 2**32)
    sleeper.join(10)
    assert woken and woken[0] < 10
    assert made.words.load(5) == 0


def test_a_sleep_ends_when_its_time_is_over_or_the_word_is_another() -> None:
    made, file = segment()
    os.close(file)
    begun = time.monotonic()
    made.words.sleep(7, 1, 20.0)  # the word is 0
    made.words.sleep(7, 0, 0.05)
    assert time.monotonic() - begun < 10


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=60))
def test_what_an_arena_hands_out_never_overlaps_and_comes_back(wishes: list[tuple[bool, int]]) -> None:
    arena = Arena(1024, 1024 + 2**20)
    held: dict[int, int] = {}
    for give, number in wishes:
        if give and held:
            offset = sorted(held)[number % len(held)]
            del held[offset]
            arena.give(offset)
        else:
            offset = arena.take(number)
            held[offset] = number
        spans = sorted((offset, offset + max(nbytes, 1)) for offset, nbytes in held.items())
        assert all(offset % ALIGNMENT == 0 and offset >= 1024 for offset, _ in spans)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    for offset in held:
        arena.give(offset)
    assert arena.taken == 0
    assert arena.take(2**20) == 1024  # it is one piece again


def test_an_arena_that_is_full_says_how_large_its_largest_hole_is() -> None:
    arena = Arena(0, 640)
    arena.take(100)
    with pytest.raises(MemoryError, match=r"576 bytes of shared memory do not fit; the largest hole has 512"):
        arena.take(570)


def test_a_process_is_running_then_stopped_then_gone() -> None:
    child = subprocess.Popen(["sleep", "60"])
    process = Process.of(child.pid)
    assert process.life() is Life.RUNNING
    child.send_signal(signal.SIGSTOP)
    assert within_a_while(process, Life.STOPPED)
    child.kill()
    assert within_a_while(process, Life.GONE), "even before its parent has awaited it"
    child.wait()
    assert process.life() is Life.GONE
    with pytest.raises(OSError, match="shows no process"):
        Process.of(child.pid)


def within_a_while(process: Process, life: Life) -> bool:
    end = time.monotonic() + 10
    while process.life() is not life and time.monotonic() < end:
        time.sleep(0.01)
    return process.life() is life


def test_another_process_with_the_same_number_is_not_the_one_we_knew() -> None:
    this = Process.of(os.getpid())
    assert this.life() is Life.RUNNING
    assert Process(this.number, this.started - 1).life() is Life.GONE
