"""What processes take, of memory and of the processors.

Memory is the kernel's proportional set size, in which a page that n processes share counts 1/n in each.

Summed over the ranks of a system, every page that they share counts once. Pages of files, which are the code of
libraries, are left out: all systems share them, and what each is charged would depend on who else runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_COUNTED = ("Pss_Anon:", "Pss_Shmem:")


def taken(processes: Iterable[int]) -> int:
    """Bytes that the processes with these numbers take together. Raises OSError if one of them is gone."""
    return sum(_taken(process) for process in processes)


def _taken(process: int) -> int:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    sizes = {words[0]: int(words[1]) for words in map(str.split, lines[1:])}
    return 1024 * sum(sizes[name] for name in _COUNTED)


def worked(processes: Iterable[int]) -> float:
    """Seconds that the processes have been computing, all their threads together."""
    return sum(_ticks(process) for process in processes) / os.sysconf("SC_CLK_TCK")


def all_worked() -> float:
    """Seconds that the machine's processors have been computing, for whomever."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _ticks(process: int) -> int:
    after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    user, system = after_name[11:13]
    return int(user) + int(system)
