"""Torch's elastic agent for the ranks of one machine, with what a launcher must know afterwards: how each ended.

`torch.distributed.launcher.api.elastic_launch` puts the same agent together, but of all the ranks that failed it
names one, which need not be the first, and says nothing of the exit codes of the others. What to make of them is
`launch`'s to say.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters

from meshwright.comm import signals
from meshwright.comm.worker import Job

_INTERVAL = 0.1
"""Seconds between two looks at the ranks: how long a failure may stay unnoticed."""


class Agent(LocalElasticAgent):
    """The agent of torch, which also remembers the processes that it started."""

    def __init__(self, spec: WorkerSpec, folder: Path) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder)), start_method="forkserver")
        self._others = set(multiprocessing.active_children())
        self._started: dict[int, BaseProcess] = {}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Nobody could end them before all are known. Torch's handlers see a signal that comes meanwhile afterwards.
        with signals.held():
            ids: dict[int, Any] = super()._start_workers(worker_group)
        children = {child.pid: child for child in multiprocessing.active_children()}
        places = {worker.global_rank: children.get(ids[worker.local_rank]) for worker in worker_group.workers}
        self._started = {rank: child for rank, child in places.items() if child is not None}
        return ids

    def ends(self, result: RunResult) -> Mapping[int, int]:
        """The exit code of every rank that did not end well, once all have ended."""
        reported = {rank: failure.exitcode for rank, failure in result.failures.items()}
        return reported | {rank: child.exitcode for rank, child in self._started.items() if child.exitcode}

    def kill(self) -> None:
        """End what still runs, which is something only if the ranks could not all be started."""
        for child in set(multiprocessing.active_children()) - self._others:
            child.kill()
            child.join()


def run_ranks(function: Callable[[Job], None], job: Job, ranks: int) -> Mapping[int, int]:
    """Run `function(job)` on `ranks` processes; the exit codes of those that did not end well, by rank.

    Raises torch's SignalException if a signal told this process to stop. No rank runs any more when this ends.
    """
    # The agents of a run meet in a store. Ours is alone, and a file does not listen on a network.
    meeting = RendezvousParameters(
        backend="c10d",
        endpoint=str(job.folder / "agents"),
        run_id="launch",
        min_nodes=1,
        max_nodes=1,
        local_addr="localhost",
        store_type="file",
    )
    with _quiet(), _without_shared_store():
        spec = WorkerSpec(
            role="rank",
            local_world_size=ranks,
            entrypoint=function,
            args=(job,),
            rdzv_handler=rendezvous.get_rendezvous_handler(meeting),
            max_restarts=0,
            monitor_interval=_INTERVAL,
            local_addr="localhost",
        )
        agent = Agent(spec, job.folder / "logs")
        try:
            return agent.ends(agent.run())
        finally:
            agent.kill()
            spec.rdzv_handler.shutdown()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the loggers with which torch's agent reports what `launch` reports better."""
    noisy = ("torch.distributed.elastic", "torch.multiprocessing")
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(noisy)]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


@contextmanager
def _without_shared_store() -> Iterator[None]:
    """Keep torch's agent from serving a store over TCP to ranks that do not ask for one."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
