"""The process of one rank, from its first line to the call of the entry function, and what it leaves if that raises.

Runs in a process that `comm.agent` started; the launcher reads what it left. Nothing here imports torch before a rank
runs.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from meshwright.comm import signals
from meshwright.comm.start import Start

Entry = Callable[[Start, Any], None]

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Failure:
    """What a rank writes down when an exception ends it.

    Args:
        rank: the rank.
        when: `time.monotonic_ns`, which all processes of a machine share.
        lost_peer: whether another rank's end explains it: an error of communication.
        text: the traceback.
    """

    rank: int
    when: int
    lost_peer: bool
    text: str

    @classmethod
    def read(cls, path: Path) -> Self:
        """The failure that a rank wrote to `path`."""
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Job:
    """What a rank's process is given: what to run, on what, the folder to meet in, and its share of the cores."""

    entry: Entry
    argument: Any
    folder: Path
    threads: int


def run_rank(job: Job) -> None:
    """What the process of a rank runs; torch's agent has put its place into the environment."""
    _end_with_launcher()
    signals.end_at_once()
    import torch

    torch.set_num_threads(job.threads)
    start = _start(os.environ, job.folder)
    try:
        job.entry(start, job.argument)
    except Exception as error:
        _write_failure(job.folder / f"failure-{start.rank}.json", start.rank, error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # not through the destructors of process groups, which may wait for peers that will not answer


def _start(env: Mapping[str, str], folder: Path) -> Start:
    attempt = int(env["TORCHELASTIC_RESTART_COUNT"])
    return Start(
        rank=int(env["RANK"]),
        ranks=int(env["WORLD_SIZE"]),
        local_rank=int(env["LOCAL_RANK"]),
        local_ranks=int(env["LOCAL_WORLD_SIZE"]),
        rendezvous=f"file://{folder}/store-{attempt}",
        attempt=attempt,
        agent_store=False,
    )


def _end_with_launcher() -> None:
    """Have the kernel kill this process when its parent, the fork server, is gone; that goes when the launcher does.

    The fork server waits for the end of a pipe, whose writing end it hands to every process that it forks: they might
    ask for processes themselves. A rank does not, and must close its copy: otherwise it keeps its parent alive.
    """
    alive = getattr(multiprocessing.forkserver._forkserver, "_forkserver_alive_fd", None)
    if alive is not None:
        os.close(alive)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    launcher = multiprocessing.parent_process()
    if launcher is not None and not launcher.is_alive():  # it died before the kernel knew
        os._exit(1)


def _write_failure(path: Path, rank: int, error: Exception) -> None:
    failure = Failure(rank, time.monotonic_ns(), _lost_peer(error), traceback_below(error))
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(failure)))
    draft.rename(path)


def _from_gloo(error: BaseException) -> bool:
    """Gloo's own errors are plain RuntimeErrors; each names the line of its source that noticed the loss."""
    return isinstance(error, RuntimeError) and "gloo" in str(error)


def traceback_below(error: Exception) -> str:
    """The traceback of `error` without the frame that caught it, which is ours and says nothing."""
    below = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return "".join(traceback.format_exception(type(error), error, below))


def _lost_peer(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, is one of communication."""
    import torch.distributed as dist

    from meshwright.comm.group import CommunicationError

    while error is not None:
        if isinstance(error, CommunicationError | dist.DistError) or _from_gloo(error):
            return True
        error = error.__cause__ or error.__context__
    return False
