"""Rules of the house that no linter keeps."""

from __future__ import annotations

import ast
from pathlib import Path

import meshwright

ROOT = Path(meshwright.__file__).parent


def imported(file: Path) -> set[str]:
    """Every module that a file imports, at any depth of the code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_only_comm_speaks_to_torch_distributed() -> None:
    # torch.distributed.elastic starts and watches processes; it communicates nothing between them.
    for file in ROOT.rglob("*.py"):
        if "comm" in file.relative_to(ROOT).parts:
            continue
        found = {name for name in imported(file) if name.startswith("torch.distributed")}
        assert all(name.startswith("torch.distributed.elastic") for name in found), f"{file.name}: {sorted(found)}"


def test_nothing_reads_a_pickle() -> None:
    for file in ROOT.rglob("*.py"):
        assert not imported(file) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, file.name
        assert "torch.load" not in file.read_text(), file.name
