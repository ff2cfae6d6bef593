"""The names that the library promises, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import meshwright


def test_the_public_names_are_these() -> None:
    assert meshwright.__all__ == ["LossSum", "Parallel", "parallelize"]
    assert meshwright.parallelize.__name__ == "parallelize"
    assert meshwright.Parallel.__name__ == "Parallel"
    assert meshwright.LossSum.__name__ == "LossSum"
    with pytest.raises(AttributeError, match="'meshwright' has no attribute 'paralelize'"):
        _ = meshwright.paralelize


def test_the_library_itself_does_not_load_torch() -> None:
    code = "import sys, meshwright; print('torch' in sys.modules); meshwright.LossSum; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
