"""What every rank did in one step, measured, in one file: `trace.json`, which chrome://tracing and Perfetto open.

Each rank counts its seconds from a barrier, so times of different ranks are comparable to about the time of a barrier.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.comm.connect import Groups
from meshwright.schedule.timeline import Timeline

TRACE = "trace.json"


def write_trace(groups: Groups, own: Timeline, run: Path) -> None:
    """Join the timelines of all ranks and write them below `run`; every rank must call this with its own."""
    part = _part(run, groups.rank)
    part.write_text(str(own))
    groups.world.barrier()
    if groups.rank == 0:
        parts = [_part(run, rank) for rank in range(groups.mesh.size)]
        spans = [span for file in parts for span in Timeline.parse(file.read_text()).spans]
        (run / TRACE).write_text(Timeline(tuple(spans)).to_chrome_trace())
        for file in parts:
            file.unlink()


def _part(run: Path, rank: int) -> Path:
    return run / f"{TRACE}.rank{rank}"
