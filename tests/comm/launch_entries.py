"""What the ranks of `test_launch` run, and a program that launches one of them by name."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from dataclasses import asdict
from json import dumps
from pathlib import Path

from meshwright.cli.outcome import exit_code
from meshwright.comm.launch import launch
from meshwright.comm.start import Start

LONG = 60


def report(start: Start, folder: Path) -> None:
    """Write down this rank's place."""
    import torch

    answer = {"start": asdict(start), "pid": os.getpid(), "threads": torch.get_num_threads()}
    (folder / f"{start.rank}.json").write_text(dumps(answer))


def raise_on_rank_1(start: Start, _: object) -> None:
    """One rank fails, the others would go on for long."""
    if start.rank == 1:
        raise ValueError(f"rank {start.rank} does not like this")
    time.sleep(LONG)


def lose_a_peer(start: Start, how: str) -> None:
    """The last rank ends while the others wait for it, who fail because of that."""
    import torch

    from meshwright.comm.connect import connect
    from meshwright.layout.mesh import Mesh

    groups = connect(Mesh(data=start.ranks), start, torch.device("cpu"), timeout=20.0)
    if start.rank == start.ranks - 1:
        match how:
            case "raise":
                raise ValueError("the cause")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "leave":
                os._exit(3)
    groups.data.all_reduce(torch.ones(3), label="test")


def look_for_open_ports(start: Start, folder: Path) -> None:
    """Write down the listening sockets of this rank, its fork server and its launcher."""
    listening = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6", "/proc/net/udp", "/proc/net/udp6"):
        if Path(table).exists():
            rows = (line.split() for line in Path(table).read_text().splitlines()[1:])
            listening |= {f"socket:[{row[9]}]" for row in rows if row[3] in ("0A", "07")}
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    for pid in (os.getpid(), os.getppid(), launcher.pid):
        files = (str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink())
        for file in listening.intersection(files):
            (folder / f"{pid} {file}").touch()
    (folder / f"looked-{start.rank}").touch()


def wait(start: Start, folder: str) -> None:
    """Say that this rank runs, then go on for long."""
    (Path(folder) / f"rank-{start.rank}").touch()
    time.sleep(LONG)


if __name__ == "__main__":
    raise SystemExit(exit_code(lambda: launch(globals()[sys.argv[1]], sys.argv[2], int(sys.argv[3]))))
