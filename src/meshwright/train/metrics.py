"""What a run says about itself: one `key=value` line per logged step, the same as a line of JSON, and memory."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TextIO

import torch


@dataclass(frozen=True)
class StepRecord:
    """One logged step. Loss in nats per token, rates over the time since the last logged step, memory in bytes.

    `flops_per_s` counts the model's FLOPs (no recomputation, no padding), of all ranks together; `memory` is the peak
    of the rank that needed most.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    flops_per_s: float
    memory: int
    skipped: int


@dataclass(frozen=True)
class EvaluationRecord:
    """The loss on held-out text after `step` steps, in nats per token."""

    step: int
    evaluation_loss: float


Record = StepRecord | EvaluationRecord


def line(record: Record) -> str:
    """`step=10 loss=3.2071 grad_norm=1.04 ...`: what a person reads and a shell can cut."""
    return " ".join(f"{field.name}={_text(field.name, getattr(record, field.name))}" for field in fields(record))


def _text(name: str, value: float) -> str:
    if name == "memory":
        return f"{value / 2**20:.0f}MiB"
    if name == "flops_per_s":
        return f"{value / 1e9:.2f}G"
    if name == "tokens_per_s":
        return f"{value:.0f}"
    return str(value) if isinstance(value, int) else f"{value:.4g}" if name != "lr" else f"{value:.3e}"


class RunLog:
    """Writes records as lines to `stream` and as JSON lines to a file in the run folder; only rank 0 has one."""

    def __init__(self, file: Path, stream: TextIO) -> None:
        self._file = file.open("w")
        self._stream = stream

    def write(self, record: Record) -> None:
        """Append one record to both."""
        print(line(record), file=self._stream, flush=True)
        self._file.write(json.dumps(asdict(record)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def peak_memory(device: torch.device) -> int:
    """Bytes this rank's memory has reached: the allocator's on a GPU, else the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
