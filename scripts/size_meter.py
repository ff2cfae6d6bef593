"""Prints what has grown: modules, functions and parameter lists longer than a reader likes. Reports, never fails.

A file is an idea and a screen is a function; the numbers are where to look again, not limits to dodge.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

LINES_OF_A_MODULE = 300
LINES_OF_A_FUNCTION = 40
PARAMETERS = 6

Function = ast.FunctionDef | ast.AsyncFunctionDef


def large_things(path: Path) -> Iterator[str]:
    """A line for everything in a module that is over one of the three numbers."""
    text = path.read_text()
    lines = text.count("\n")
    if lines > LINES_OF_A_MODULE:
        yield f"{path}: {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function):
            yield from _large_function(path, node)


def _large_function(path: Path, function: Function) -> Iterator[str]:
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1 - _docstring_lines(function)
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    parameters = len(named) - (bool(named) and named[0].arg in ("self", "cls"))
    if lines > LINES_OF_A_FUNCTION:
        yield f"{path}:{function.lineno}: {function.name} has {lines} lines"
    if parameters > PARAMETERS:
        yield f"{path}:{function.lineno}: {function.name} has {parameters} parameters"


def _docstring_lines(function: Function) -> int:
    """What is explained is not what is long."""
    first = function.body[0]
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return (first.end_lineno or first.lineno) - first.lineno + 1 if is_text else 0


def main() -> None:
    """Print the report for src/, scripts/ and tests/ below the working folder."""
    paths = (path for root in ("src", "scripts", "tests") for path in sorted(Path(root).rglob("*.py")))
    found = [line for path in paths for line in large_things(path)]
    limits = f"{LINES_OF_A_MODULE} lines, {LINES_OF_A_FUNCTION} lines of a function, or {PARAMETERS} parameters"
    print(f"sizes: {len(found)} over {limits}")
    for line in found:
        print(f"  {line}")


if __name__ == "__main__":
    main()
