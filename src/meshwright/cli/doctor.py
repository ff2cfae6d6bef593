"""`meshwright doctor comm LAYOUT`: whether what a layout communicates arrives, and how quickly."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from cyclopts import App

from meshwright.cli.outcome import FAILED, exit_code
from meshwright.comm.diagnosis import Diagnosis, Examination, RankReport
from meshwright.comm.launch import launch
from meshwright.comm.start import Start
from meshwright.layout.layout import Layout

PAYLOADS = (64 * 2**10, 2**20, 16 * 2**20)
"""Bytes."""

REPEATS = 7

app = App(name="doctor", help_format="plaintext")


@app.command
def comm(layout: str, /, *, json: bool = False) -> int:
    """Check and time every collective on every axis of a layout, on CPU ranks of this machine.

    Args:
        layout: As in dp2.tp2.pp2; only its axes matter.
        json: Print JSON instead of a table.
    """
    mesh = Layout.parse(layout).mesh
    with tempfile.TemporaryDirectory(prefix="meshwright-doctor-") as folder:
        examination = Examination(mesh, PAYLOADS, REPEATS, Path(folder))
        code = exit_code(lambda: launch(run_rank, examination, mesh.size))
        if code:
            return code
        reports = [RankReport.read(examination.report(rank)) for rank in range(mesh.size)]
    diagnosis = Diagnosis.of(f"dp{mesh.data}.tp{mesh.tensor}.pp{mesh.pipeline}", reports)
    print(diagnosis.json() if json else diagnosis.table())
    if not diagnosis.healthy:
        print("error: some results are wrong", file=sys.stderr)
        return FAILED
    return 0


def run_rank(start: Start, examination: Examination) -> None:
    """The examination, imported where it runs."""
    from meshwright.comm import doctor

    doctor.run_rank(start, examination)
