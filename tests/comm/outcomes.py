"""Ranks of which some are killed or stopped: what becomes of each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from meshwright.layout.mesh import Mesh
from pool import PRELOAD

PATIENCE = 30.0
"""Seconds after which a rank that says nothing hangs."""


@dataclass(frozen=True)
class Outcome:
    """The result of a rank or its error as text; when, as `time.monotonic` has it, which all processes share."""

    result: Any = None
    error: str = ""
    when: float = 0.0


class Ranks:
    """Processes that run a function of their groups."""

    def __init__(self, processes: list[Any], pipes: list[Connection]) -> None:
        self.processes = processes
        self._pipes = pipes

    def outcome(self, rank: int) -> Outcome:
        """What became of `rank`, once it has ended."""
        if not self._pipes[rank].poll(PATIENCE):
            return Outcome(error="hangs")
        try:
            outcome: Outcome = self._pipes[rank].recv()
        except EOFError:
            return Outcome(error="killed")
        return outcome

    def kill(self, rank: int) -> float:
        """Kill `rank`; when."""
        os.kill(self.processes[rank].pid, signal.SIGKILL)
        return time.monotonic()


@contextlib.contextmanager
def started(mesh: Mesh, function: Callable[..., Any], *arguments: Any, timeout: float = 20.0) -> Iterator[Ranks]:
    """Ranks that run `function(groups, *arguments)` over shared memory; who is left in the end is killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="meshwright-test-") as folder:
        processes: list[Any] = []
        pipes: list[Connection] = []
        for rank in range(mesh.size):
            ours, theirs = context.Pipe()
            details = (theirs, mesh, rank, folder, timeout, function, arguments)
            processes.append(context.Process(target=_run, args=details, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            yield Ranks(processes, pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _run(
    pipe: Connection,
    mesh: Mesh,
    rank: int,
    folder: str,
    timeout: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch

    from meshwright.comm.connect import connect
    from meshwright.comm.start import Start

    torch.set_num_threads(1)
    try:
        start = Start(rank, mesh.size, rank, mesh.size, f"file://{folder}/store", attempt=0, agent_store=False)
        groups = connect(mesh, start, torch.device("cpu"), timeout, "shared")
        outcome = Outcome(function(groups, *arguments), "", time.monotonic())
    except Exception as error:
        outcome = Outcome(None, f"{type(error).__name__}: {error}", time.monotonic())
    with contextlib.suppress(BrokenPipeError):
        pipe.send(outcome)
    os._exit(0)


def signal_self(number: signal.Signals) -> float:
    """Send this process a signal; when."""
    when = time.monotonic()
    os.kill(os.getpid(), number)
    return when
