"""Lines that people and programs read."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch

from meshwright.train.metrics import EvaluationRecord, RunLog, StepRecord, line, peak_memory

RECORD = StepRecord(
    step=10,
    loss=3.20714,
    grad_norm=1.0412,
    lr=3e-4,
    tokens_per_s=12345.6,
    flops_per_s=7.5e10,
    memory=300 * 2**20,
    skipped=0,
)


def test_a_record_prints_as_key_equals_value() -> None:
    assert line(RECORD) == (
        "step=10 loss=3.207 grad_norm=1.041 lr=3.000e-04 tokens_per_s=12346 flops_per_s=75.00G memory=300MiB skipped=0"
    )
    assert line(EvaluationRecord(5, 2.5)) == "step=5 evaluation_loss=2.5"


def test_the_log_writes_the_same_to_the_screen_and_as_json_lines(tmp_path: Path) -> None:
    screen = io.StringIO()
    log = RunLog(tmp_path / "log.jsonl", screen)
    log.write(RECORD)
    log.write(EvaluationRecord(10, 2.25))
    log.close()
    first, second = (json.loads(text) for text in (tmp_path / "log.jsonl").read_text().splitlines())
    assert first["loss"] == RECORD.loss
    assert second == {"step": 10, "evaluation_loss": 2.25}
    assert screen.getvalue().splitlines() == [line(RECORD), "step=10 evaluation_loss=2.25"]


def test_peak_memory_grows_with_what_is_held() -> None:
    before = peak_memory(torch.device("cpu"))
    held = torch.ones(before // 4)  # as many bytes as the peak was, on top of what this process holds already
    assert peak_memory(torch.device("cpu")) > before
    del held
