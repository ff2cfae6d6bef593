"""The examples run as they say, and print the same however the work is divided."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def losses(*command: str) -> list[float]:
    """What an example prints as its losses."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=True
    )
    return [float(found) for found in re.findall(r"^step +\d+: loss ([0-9.]+)", done.stdout, re.MULTILINE)]


@pytest.mark.ranks
@pytest.mark.timeout(200)
def test_any_module_learns_the_same_alone_and_over_two_ranks() -> None:
    alone = losses("examples/any_module.py")
    assert len(alone) == 4
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/any_module.py")
    assert losses(*torchrun, "dp2/zero3/m2")[:2] == pytest.approx(alone[:2], rel=1e-3)
