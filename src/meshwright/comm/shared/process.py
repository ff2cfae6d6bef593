"""Whether another process of this host still lives, from `/proc`.

A number alone may come to belong to another process, so a process is known by its number and when it started.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Life(Enum):
    """What a process is doing, as far as those who wait for it care."""

    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"


@dataclass(frozen=True)
class Process:
    """A process of this host: its number, and its start in clock ticks since the host was booted."""

    number: int
    started: int

    @classmethod
    def of(cls, number: int) -> Process:
        """The process that has that number now."""
        fields = _fields(number)
        if fields is None:
            raise OSError(f"/proc shows no process {number}")
        return cls(number, int(fields[19]))

    def life(self) -> Life:
        """What it is doing now; one that has ended and was not awaited by its parent is gone."""
        fields = _fields(self.number)
        if fields is None or int(fields[19]) != self.started or fields[0] in "ZXx":
            return Life.GONE
        return Life.STOPPED if fields[0] in "Tt" else Life.RUNNING


def _fields(number: int) -> list[str] | None:
    """The fields of `/proc/<pid>/stat` from the state on (see proc(5)), if there is such a process."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()
