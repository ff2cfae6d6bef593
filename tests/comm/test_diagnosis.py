"""What the doctor found on all ranks, put together and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.comm.diagnosis import Diagnosis, Measurement, RankReport, moved_bytes
from meshwright.comm.ledger import Kind

RIGHT = Measurement("data", 4, "gloo", Kind.ALL_REDUCE, 1_000_000, 0.001)
SLOWER = Measurement("data", 4, "gloo", Kind.ALL_REDUCE, 1_000_000, 0.003)
WRONG = Measurement("data", 4, "gloo", Kind.ALL_REDUCE, 1_000_000, 0.002, ("rank 1 in data group (0, 1): wrong",))
BARRIER = Measurement("data", 4, "gloo", Kind.BARRIER, 0, 0.0005)


def test_a_report_reads_back(tmp_path: Path) -> None:
    report = RankReport(1e10, (RIGHT, WRONG, BARRIER))
    report.write(tmp_path / "rank-0.json")
    assert RankReport.read(tmp_path / "rank-0.json") == report


def test_the_slowest_rank_and_any_rank_that_is_wrong_count() -> None:
    diagnosis = Diagnosis.of("dp4", [RankReport(rate, (row,)) for rate, row in ((2e10, RIGHT), (1e10, WRONG))])
    assert (diagnosis.copy_rate, diagnosis.measurements) == (1e10, (WRONG,))
    assert not diagnosis.healthy
    both = Diagnosis.of("dp4", [RankReport(1e10, (row,)) for row in (RIGHT, SLOWER)])
    assert both.measurements == (SLOWER,)
    assert both.healthy


def test_a_time_stands_beside_the_limit_that_a_copy_sets() -> None:
    diagnosis = Diagnosis("dp4", 1e10, (RIGHT, BARRIER))
    heading, _, _, all_reduce, barrier = diagnosis.table().splitlines()
    assert heading == "dp4: a rank copies 10.0 GB/s while all do, which sets the limit"
    assert all_reduce.split() == ["data", "4", "gloo", "all-reduce", "1.00", "1.000", "1.50", "0.150", "15%", "right"]
    assert barrier.split() == ["data", "4", "gloo", "barrier", "0.00", "0.500", "right"]


@pytest.mark.parametrize(
    ("kind", "moved"),
    [
        (Kind.ALL_REDUCE, 300),
        (Kind.REDUCE_SCATTER, 125),
        (Kind.ALL_GATHER, 200),
        (Kind.BROADCAST, 150),
        (Kind.SEND, 200),
    ],
)
def test_what_a_rank_must_read_and_write(kind: Kind, moved: int) -> None:
    assert moved_bytes(kind, 100, 4) == moved


def test_what_is_wrong_is_listed_below_the_table() -> None:
    text = Diagnosis("dp4", 1e10, (WRONG,)).table()
    assert "WRONG" in text
    assert text.endswith("\nrank 1 in data group (0, 1): wrong")


def test_one_rank_communicates_nothing() -> None:
    assert "nothing is communicated" in Diagnosis("dp1", 1e10, ()).table()


def test_json_has_everything() -> None:
    found = json.loads(Diagnosis("dp4", 1e10, (RIGHT, WRONG)).json())
    assert (found["layout"], found["healthy"], found["copy_rate"]) == ("dp4", False, 1e10)
    first, second = found["measurements"]
    assert (first["kind"], first["rate"]) == ("all-reduce", pytest.approx(1.5e9))
    assert (first["limit"], first["reached"]) == (pytest.approx(1.5e-4), pytest.approx(0.15))
    assert first["wrong"] == []
    assert second["wrong"] == list(WRONG.wrong)
