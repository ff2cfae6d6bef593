"""`meshwright doctor comm`: the table, the JSON, and its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from meshwright.cli import doctor
from meshwright.cli.main import main
from meshwright.comm.diagnosis import Examination, Measurement, RankReport
from meshwright.comm.ledger import Kind


@pytest.mark.ranks
def test_the_ranks_of_a_layout_are_examined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "PAYLOADS", (4096,))
    assert main(["doctor", "comm", "tp2/zero1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["layout"], found["healthy"]) == ("dp1.tp2.pp1", True)
    assert {row["axis"] for row in found["measurements"]} == {"tensor"}


@pytest.mark.parametrize(("wrong", "code", "text"), [((), 0, "right"), (("it is not",), 1, "WRONG")])
def test_a_wrong_result_is_exit_code_1(
    wrong: tuple[str, ...], code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Measurement("data", 2, "gloo", Kind.ALL_GATHER, 100, 0.001, wrong)

    def launch(entry: Callable[..., None], examination: Examination, ranks: int) -> None:
        for rank in range(ranks):
            RankReport(1e10, (row,)).write(examination.report(rank))

    monkeypatch.setattr(doctor, "launch", launch)
    assert main(["doctor", "comm", "dp2"]) == code
    output, errors = capsys.readouterr()
    assert text in output
    assert errors == ("error: some results are wrong\n" if wrong else "")


def test_a_layout_that_is_none_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "comm", "dx2"]) == 2
    assert 'the nearest is "dp2"' in capsys.readouterr().err


def test_help_leaves_torch_alone() -> None:
    code = (
        "import sys\nfrom meshwright.cli.main import main\n"
        "assert main(['doctor', 'comm', '--help']) == 0\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
