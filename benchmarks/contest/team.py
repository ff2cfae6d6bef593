"""The processes of one system, seen from outside: started once, asked to train by turns, and ended whatever happens."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from contest import memory
from contest.catalogue import SYSTEMS
from contest.rank import Answer, Failed, Turn, serve
from contest.work import Seat, Work

PATIENCE = 600.0
"""Seconds that an answer may take."""


class TeamError(RuntimeError):
    """A process of the system raised, ended, or did not answer; the others have been ended."""


class Team:
    """Use it in a `with`: afterwards no process of it is left."""

    def __init__(self, name: str, work: Work, folder: Path) -> None:
        self.name = name
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        ranks = SYSTEMS[name].ranks
        for rank in range(ranks):
            self._start(Seat(work, rank, ranks, str(folder / f"{name}-meeting")), str(folder / f"{name}-{rank}.log"))
        self._imported = 0
        self._worked = 0.0

    def _start(self, seat: Seat, log: str) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs, self.name, seat, log), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill every process that still runs."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            pipe.close()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    # --- what it can be asked ------------------------------------------------------------------------------------

    def wait_until_imported(self) -> None:
        """Return when all processes have imported what they need, and note what that takes."""
        self._collect()
        try:
            self._imported = memory.taken(self._numbers)
        except OSError as error:
            self.end()
            raise TeamError(f"a rank has ended: {error}") from None

    def prepare(self) -> None:
        """Set the system up."""
        self._ask(None)
        self._collect()

    def train(self, steps: int) -> list[Turn]:
        """Train; the turn of each rank."""
        self._ask(steps)
        return _turns(self._collect())

    def watched(self, steps: int) -> tuple[int, list[Turn]]:
        """Train and look on; also the most bytes that all processes took together, beyond the imports."""
        peak = 0

        def look() -> None:
            nonlocal peak
            peak = max(peak, memory.taken(self._numbers))

        self._ask(steps)
        turns = _turns(self._collect(look))
        return peak - self._imported, turns

    @property
    def worked(self) -> float:
        """Seconds that its processes have been computing; it does not go on if one of them has ended."""
        with suppress(OSError):  # whoever asks it to train next will find out
            self._worked = memory.worked(self._numbers)
        return self._worked

    @property
    def _numbers(self) -> list[int]:
        return [process.pid for process in self._processes]

    def _ask(self, question: int | None) -> None:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(question)
            except OSError:
                self.end()
                raise TeamError(f"rank {rank} has ended while it was not on turn") from None

    def _collect(self, meanwhile: Callable[[], None] | None = None) -> list[Answer]:
        """The next answer of every rank. Ends the team and raises TeamError if one of them does not come."""
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + PATIENCE
        try:
            while len(answers) < len(self._pipes):
                if meanwhile is not None:
                    meanwhile()
                waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
                patience = deadline - time.monotonic()
                for pipe in wait(list(waiting), 0.001 if meanwhile and patience > 0 else patience):
                    rank = waiting[pipe]  # type: ignore[index]
                    answers[rank] = _received(self._pipes[rank], rank)
                if patience <= 0:
                    raise TeamError(f"no answer from ranks {sorted(waiting.values())} after {PATIENCE:.0f} s")
        except (TeamError, OSError) as error:
            self.end()
            raise error if isinstance(error, TeamError) else TeamError(str(error)) from error
        return [answers[rank] for rank in range(len(answers))]


def _turns(answers: list[Answer]) -> list[Turn]:
    return [answer for answer in answers if isinstance(answer, Turn)]


def _received(pipe: Connection, rank: int) -> Answer:
    try:
        answer: Answer = pipe.recv()
    except EOFError:
        raise TeamError(f"rank {rank} ended without a word") from None
    if isinstance(answer, Failed):
        raise TeamError(f"rank {rank}: {answer.text}")
    return answer
