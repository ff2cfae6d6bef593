"""What the documents say was counted is what is counted now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tables_on_zero_say_what_live_ranks_hold_and_send() -> None:
    program = ROOT / "benchmarks" / "zero_page.py"
    done = subprocess.run(
        [sys.executable, str(program), "--check"], capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr
