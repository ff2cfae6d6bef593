"""Starts the ranks of one machine and ends them: all of them, whatever happens to one of them or to the launcher.

    launcher ──► fork server ──► rank 0, rank 1, ...      the fork server has imported torch once, for all ranks
       │
       └──► sweeper                                       removes the launcher's folder if the launcher cannot

A rank that raises writes its traceback to that folder and ends; torch's elastic agent (`comm.agent`) sees it and
stops the others. Ctrl-C ends every rank at once, since all have the default action for it. A killed launcher takes
the fork server with it, whose death the kernel answers by killing the ranks. Nothing listens on a network: the ranks
meet in a file.

Not for several machines: there torchrun or SLURM start the ranks, and `Start.from_environment` reads what they say.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.comm import signals
from meshwright.comm.start import Start
from meshwright.comm.worker import Entry, Failure, Job, run_rank, traceback_below

# What every rank imports anyway. A module that does not exist is passed over.
_PRELOAD = ["torch", "torch.distributed", "meshwright.comm.connect", "meshwright.train.trainer"]

# A line on the pipe says that the launcher has tidied up itself. The end of the pipe without one says that it is
# dead; then a dying rank may still be writing, so the removal is tried again for a while.
_SWEEP = 'read -r _ || for i in 1 2 3 4 5 6 7 8 9; do rm -rf -- "$1" 2>/dev/null && exit; sleep 0.3; done'


class RankFailure(RuntimeError):  # noqa: N818  # it reports the failure of another process, with that one's traceback
    """A rank failed and all were stopped. `rank` is the first that failed, `text` its traceback or how it ended."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} failed:\n{text}")
        self.rank = rank
        self.text = text


class Interrupted(KeyboardInterrupt):
    """A signal asked the launcher to stop, and all ranks have been stopped."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def launch(entry: Entry, argument: Any, ranks: int) -> None:
    """Run `entry(start, argument)` on `ranks` processes of this machine; both must be picklable.

    One rank runs in this process. Returns when all have returned.

    Raises:
        RankFailure: a rank raised, was killed, or left with an exit code; the others were stopped.
        Interrupted: this process was told to stop by a signal (or KeyboardInterrupt, before ranks were running).
    """
    assert ranks >= 1, ranks
    if ranks == 1:
        _run_here(entry, argument)
        return
    with _folder() as folder:
        threads = threads_per_rank(ranks)
        _start_fork_server(threads)
        ends = _run_ranks(Job(entry, argument, folder, threads), ranks)
        failure = first_failure(ends, [Failure.read(path) for path in folder.glob("failure-*.json")])
    if failure is not None:
        raise failure


def _run_ranks(job: Job, ranks: int) -> Mapping[int, int]:
    """The exit codes of the ranks that did not end well."""
    with signals.held():
        # Torch comes in here and not above: the fork server is importing it at the same time, on another core.
        from torch.distributed.elastic.multiprocessing import SignalException

        from meshwright.comm.agent import run_ranks

    try:
        with signals.handlers_restored():
            return run_ranks(run_rank, job, ranks)
    except SignalException as stop:
        raise Interrupted(stop.sigval) from None


def _start_fork_server(threads: int) -> None:
    """Have a process import what every rank needs; nothing happens if this one's is running already."""
    multiprocessing.set_forkserver_preload(_PRELOAD)
    # OpenMP reads the variable once, when its library is loaded, and that happens in the fork server.
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    multiprocessing.resource_tracker.ensure_running()  # first, because it would let go of the signals that are held
    try:
        # A Ctrl-C is meant for the launcher. The fork server ignores it only once its imports are done.
        with signals.held():
            multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def threads_per_rank(ranks: int) -> int:
    """This machine's cores shared out, or what OMP_NUM_THREADS says."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(given) if given.isdecimal() and int(given) else max(1, cores // ranks)


def first_failure(ends: Mapping[int, int], failures: list[Failure]) -> RankFailure | None:
    """Which of all that went wrong was the cause, and which only followed from it.

    Args:
        ends: the exit code of each rank that did not end well; minus the signal for one that a signal ended.
        failures: what ranks wrote down.

    A rank that lost a peer is never the cause while there is another: neither before one with an error of its own,
    nor before one that was killed and could not write anything.
    """
    if not ends and not failures:
        return None
    in_order = sorted(failures, key=lambda failure: (failure.lost_peer, failure.when))
    if in_order and not in_order[0].lost_peer:
        return RankFailure(in_order[0].rank, in_order[0].text)
    silent = {rank: code for rank, code in ends.items() if all(failure.rank != rank for failure in failures)}
    # SIGTERM is how the agent ends those that are still running once something has failed.
    killed = {rank: code for rank, code in silent.items() if code != -signal.SIGTERM} or ({} if in_order else silent)
    if killed:
        rank = min(killed)
        return RankFailure(rank, _how_it_ended(rank, killed[rank]))
    return RankFailure(in_order[0].rank, in_order[0].text)


def _how_it_ended(rank: int, code: int) -> str:
    if code >= 0:
        return f"rank {rank} left with exit code {code} and raised nothing"
    hint = "; the system does that when memory runs out" if code == -signal.SIGKILL else ""
    return f"rank {rank} was killed by {signal.Signals(-code).name} (signal {-code}){hint}"


def _run_here(entry: Entry, argument: Any) -> None:
    try:
        entry(Start(0, 1, 0, 1, f"file://{os.devnull}", attempt=0, agent_store=False), argument)
    except Exception as error:
        raise RankFailure(0, traceback_below(error)) from error


@contextmanager
def _folder() -> Iterator[Path]:
    """A private folder that is gone afterwards, even if this process is killed.

    It stands in multiprocessing's own folder of this process, which has the same need: the sweeper removes both.
    """
    root = multiprocessing.util.get_temp_dir()
    sweeper = subprocess.Popen(
        ["sh", "-c", _SWEEP, "sh", root],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # out of reach of a Ctrl-C in the terminal
    )
    try:
        with tempfile.TemporaryDirectory(prefix="launch-", dir=root) as folder:
            yield Path(folder)
    finally:
        sweeper.communicate(b"tidy\n")
