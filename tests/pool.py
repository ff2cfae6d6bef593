"""A pool of rank processes that lives as long as the test session.

Processes come from a fork server that has imported torch once. A test hands a module-level function and a mesh to
`RankPool.run`; each rank connects (once per mesh: groups are kept) and calls `function(groups, *arguments)`. When a
rank raises, or does not answer in time, all are replaced, so one failing test cannot poison the next.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from meshwright.layout.mesh import Mesh

PRELOAD = ["torch", "torch.distributed", "meshwright.comm.connect", "numpy"]


class RankFailedError(AssertionError):
    """A rank raised; the text is its traceback."""


def _serve(pipe: multiprocessing.connection.Connection) -> None:
    """The loop of one rank: connect, call, answer."""
    import torch

    from meshwright.comm.connect import Groups, connect
    from meshwright.comm.start import Start

    torch.set_num_threads(1)
    connected: dict[Mesh, Groups] = {}
    while True:
        try:
            mesh, rank, folder, timeout, transport, function, arguments = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            if mesh not in connected:
                rendezvous = f"file://{folder}/{mesh.data}-{mesh.pipeline}-{mesh.tensor}"
                start = Start(rank, mesh.size, rank, mesh.size, rendezvous, attempt=0, agent_store=False)
                connected[mesh] = connect(mesh, start, torch.device("cpu"), timeout, transport)
            connected[mesh].ledger.clear()
            answer = ("result", function(connected[mesh], *arguments))
        except BaseException:
            answer = ("error", traceback.format_exc())
        pipe.send(answer)


class RankPool:
    """Up to as many ranks as a test asks for; see the module's text."""

    def __init__(self, timeout: float = 20.0, transport: str = "auto") -> None:
        self.timeout = timeout
        self.transport = transport
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._workers: list[tuple[Any, multiprocessing.connection.Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, mesh: Mesh, function: Callable[..., Any], *arguments: Any, limit: float = 100.0) -> list[Any]:
        """Call `function(groups, *arguments)` on every rank of `mesh`; the results in the order of ranks."""
        return self.run_each(mesh, function, [arguments] * mesh.size, limit=limit)

    def run_each(
        self, mesh: Mesh, function: Callable[..., Any], arguments: list[tuple[Any, ...]], limit: float = 100.0
    ) -> list[Any]:
        """The same with other arguments for each rank."""
        self._grow(mesh.size)
        assert self._folder is not None
        workers = self._workers[: mesh.size]
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((mesh, rank, self._folder.name, self.timeout, self.transport, function, arguments[rank]))
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + limit
        while len(answers) < mesh.size:
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(workers) if rank not in answers}
            ready = multiprocessing.connection.wait(list(waiting), deadline - time.monotonic())
            if not ready:
                self.close()
                raise RankFailedError(f"ranks {sorted(waiting.values())} of {mesh} did not answer in {limit:.0f} s")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = ("error", "the process died")
                if answers[rank][0] == "error":
                    self.close()
                    raise RankFailedError(f"rank {rank} of {mesh}:\n{answers[rank][1]}")
        return [answers[rank][1] for rank in range(mesh.size)]

    def close(self) -> None:
        """End every process; the next `run` starts new ones."""
        for process, pipe in self._workers:
            process.kill()
            pipe.close()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _grow(self, ranks: int) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="meshwright-test-")
        while len(self._workers) < ranks:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
