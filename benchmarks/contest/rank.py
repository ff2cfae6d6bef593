"""The process of one rank: sets its system up when it is told to, trains when it is told to, and sleeps otherwise."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

# The first optimizer that is made imports it, and imports are not counted as memory of a system.
import torch._dynamo

from contest.catalogue import SYSTEMS
from contest.rivals import Train
from contest.work import Batch, Seat


@dataclass(frozen=True)
class Ready:
    """The process has done what it was told, and sleeps."""


@dataclass(frozen=True)
class Turn:
    """Some steps: when they began and when each ended, by the clock that all processes share, and their losses."""

    begun: float
    ended: tuple[float, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Failed:
    """The process ends; the text is its traceback."""

    text: str


Answer = Ready | Turn | Failed


def serve(pipe: Connection, name: str, seat: Seat, log: str) -> None:
    """Answer once after the imports, once when the system is set up, and then to every number of steps."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _write_to(log)
    try:
        for answer in _answers(pipe, name, seat):
            pipe.send(answer)
    except EOFError:
        pass
    except BaseException:
        pipe.send(Failed(traceback.format_exc()))
    os._exit(0)  # not through the destructors of process groups, which may wait for each other


def _answers(pipe: Connection, name: str, seat: Seat) -> Iterator[Answer]:
    system = SYSTEMS[name]
    torch.set_num_threads(system.threads)
    if system.module:
        importlib.import_module(system.module)
    yield Ready()
    pipe.recv()
    train, batches = system.prepare(seat), seat.batches()
    yield Ready()
    while True:
        steps = pipe.recv()
        yield _turn(train, [next(batches) for _ in range(steps)])


def _turn(train: Train, batches: list[Batch]) -> Turn:
    ended, losses = [], []
    begun = time.perf_counter()
    for batch in batches:
        losses.append(train(batch))
        ended.append(time.perf_counter())
    return Turn(begun, tuple(ended), tuple(losses))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _write_to(log: str) -> None:
    """Have everything that the libraries print go to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
