"""The pure half answers without torch."""

from __future__ import annotations

import subprocess
import sys

IMPORT_ALL = """
import importlib, pkgutil, sys
for package in ("layout", "schedule", "costs", "planner", "report"):
    root = importlib.import_module(f"meshwright.{package}")
    for module in pkgutil.walk_packages(root.__path__, root.__name__ + "."):
        importlib.import_module(module.name)
from meshwright.layout.layout import Layout
from meshwright.report.text import show
assert show(Layout.parse("dp2.tp2.pp4/zero1/1f1b/m8"))
print(*sorted({"torch", "numpy", "rich"} & set(sys.modules)))
"""


def test_no_module_of_the_pure_half_imports_torch_even_indirectly() -> None:
    found = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == []
