"""Measures what ZeRO promises, on live ranks, and writes the tables of `docs/zero.md`.

    python benchmarks/zero_page.py [--check]

Bytes and traffic are counted over gloo, where ranks share nothing, as in the paper (Rajbhandari et al., 2020): over
shared memory they are less. The tables of speed come from `benchmarks/results/peers-*.json`, which `peers.py --json`
has written on a quiet machine. `--check` writes nothing, and fails if a table that does not depend on the machine is
not what the page says.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.comm.connect import connect
from meshwright.comm.launch import launch
from meshwright.comm.start import Start
from meshwright.costs.sheet import parameters
from meshwright.costs.spec import GPTSpec
from meshwright.costs.traffic import of_layout
from meshwright.engine.build import build
from meshwright.layout.layout import Layout
from meshwright.layout.share import micro_batch_samples
from meshwright.layout.zero import MIXED_ADAM, model_state_bytes
from meshwright.model.batch import MicroBatch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "zero.md"
RESULTS = ROOT / "benchmarks" / "results"

SMALL = GPTSpec(layers=2, hidden=64, heads=4, sequence=16, vocabulary=256, tied=False)
LARGE = replace(SMALL, layers=26)
"""About ten times as many parameters."""

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Question:
    """A layout to train one step over, and the model."""

    layout: str
    spec: GPTSpec = SMALL


@dataclass(frozen=True)
class Counted:
    """What rank 0 has counted: bytes of states, of buffers, of stored checkpoints, and elements sent in one step."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    checkpoints: int
    sent: float

    @property
    def states(self) -> int:
        """Bytes of all model states."""
        return self.parameters + self.gradients + self.optimizer


def adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer whose states the paper counts."""
    return torch.optim.AdamW(groups, lr=1e-3, fused=True)


def answer(start: Start, given: tuple[Question, str]) -> None:
    """One rank: train a step, count, and let rank 0 write it down."""
    question, file = given
    layout = Layout.parse(question.layout)
    groups = connect(layout.mesh, start, torch.device("cpu"), transport="gloo")
    engine = build(question.spec, layout, groups, adam, dtype=DTYPE)
    batch = 8 * layout.micro_batches
    tokens = torch.arange(batch * question.spec.sequence).view(batch, -1) % question.spec.vocabulary
    groups.ledger.clear()
    parts = micro_batch_samples(batch, layout, groups.data.index)
    engine.step([MicroBatch(tokens[p.start : p.stop], tokens[p.start : p.stop]) for p in parts], 1e-3)
    if start.rank == 0:
        labels = ("gradients", "parameters", "replicas")
        sent = sum(groups.ledger.total(label=label).sent for label in labels) / DTYPE.itemsize
        states = engine.state_bytes()
        pool = next(iter(engine.stage.units.values())).gradient.pool
        counted = Counted(
            states.parameters, states.gradients, states.optimizer, pool.held_bytes, engine.stage.store.peak, sent
        )
        Path(file).write_text(json.dumps(asdict(counted)))


def ask(question: Question) -> Counted:
    """What is counted on live ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "counted.json"
        launch(answer, (question, str(file)), Layout.parse(question.layout).ranks)
        return Counted(**json.loads(file.read_text()))


# --- tables -----------------------------------------------------------------------------------------------------------


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def states_table() -> str:
    """Bytes of model states by stage, beside the formulas of the paper's section 5."""
    formulas = ("16Ψ", "4Ψ + 12Ψ/d", "2Ψ + 14Ψ/d", "16Ψ/d")
    total = parameters(SMALL)
    rows = []
    for stage, formula in enumerate(formulas):
        for data in (2, 4):
            layout = Layout(data=data, zero=stage)  # type: ignore[arg-type]
            counted = ask(Question(str(layout)))
            expected = model_state_bytes(total, data, layout.zero, MIXED_ADAM).total
            rows.append([str(stage), str(data), formula, f"{expected:,}", f"{counted.states:,}"])
    return table(["stage", "d", "formula", "by the formula", "held by a live rank"], rows)


def traffic_table() -> str:
    """Elements sent per rank and step, beside the paper's section 7."""
    total = parameters(SMALL)
    rows = []
    for text in ("dp4", "dp4/zero1", "dp4/zero2", "dp4/zero3", "dp4/zero2/m4", "dp4/zero3/m4", "dp4/zero3/shard2"):
        layout = Layout.parse(text)
        formula = of_layout(total, layout)
        counted = ask(Question(text))
        multiple = counted.sent / total
        rows.append([f"`{text}`", f"{float(formula.total) / total:.2f} Ψ", f"{multiple:.2f} Ψ"])
    return table(["layout", "by the formula", "sent by a live rank"], rows)


def buffers_table() -> str:
    """Buffers and model states as the model grows."""
    rows = []
    for spec in (SMALL, LARGE):
        counted = ask(Question("dp2/zero3/m2", spec))
        rows.append([f"{parameters(spec):,}", f"{counted.states:,}", f"{counted.buffers:,}"])
    return table(["Ψ", "model states, bytes", "gradient buffers, bytes"], rows)


def checkpoints_table() -> str:
    """Stored recompute inputs with and without P_a."""
    rows = []
    for tensor in (1, 2, 4):
        whole, split = (ask(Question(f"tp{tensor}/recompute-full{part}")) for part in ("", "/pa"))
        ratio = split.checkpoints / whole.checkpoints
        rows.append([str(tensor), f"{whole.checkpoints:,}", f"{split.checkpoints:,}", f"{ratio:.3f}"])
    return table(["t", "checkpoints, bytes per rank", "with `pa`", "ratio"], rows)


def peers_tables() -> str:
    """What `peers.py` has measured."""
    blocks = []
    for file in sorted(RESULTS.glob("peers-*.json")):
        played = json.loads(file.read_text())
        for match in _matches(played):
            first = match[0]
            rows = [[_speed(row), *_ratios(row)] for row in match]
            heads = ["system", "tokens/s", "÷ best rival", "÷ limit", "peak MB", "÷ leanest rival"]
            blocks.append(
                f"**{first['size']}, {first['dtype']}, stage {first['stage']}**\n\n"
                + table(heads, [[row["title"], *cells] for row, cells in zip(match, rows, strict=True)])
            )
    return "\n\n".join(blocks) or "not measured yet"


def _matches(rows: Sequence[Any]) -> Iterator[list[Any]]:
    seen: dict[tuple[str, str, int], list[Any]] = {}
    for row in rows:
        seen.setdefault((row["size"], row["dtype"], row["stage"]), []).append(row)
    yield from seen.values()


def _speed(row: Any) -> str:
    return f"{row['speed']:,.0f}" if row["speed"] else "failed"


def _ratios(row: Any) -> list[str]:
    def ratio(name: str) -> str:
        return f"{row[name]['value']:.2f}" if row[name] else ""

    return [ratio("to_rival"), ratio("to_limit"), f"{row['peak'] / 1e6:,.0f}", ratio("peak_to_rival")]


COUNTED = {
    "states": states_table,
    "traffic": traffic_table,
    "buffers": buffers_table,
    "checkpoints": checkpoints_table,
}
"""Tables that are the same on every machine."""

RECORDED = {"peers": peers_tables}


def written(page: str, name: str, content: str) -> str:
    """The page with this between its marks. Raises ValueError if it has no such marks."""
    begin, end = f"<!-- table: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"{PAGE} has no place for the table {name}: {begin} ... {end}")
    return pattern.sub(lambda _: f"{begin}\n{content}\n{end}", page)


def main() -> None:
    """Measure, and write or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare what does not depend on the machine")
    given = parser.parse_args()
    before = page = PAGE.read_text()
    for name, make in (COUNTED if given.check else COUNTED | RECORDED).items():
        page = written(page, name, make())
    if given.check and page != before:
        sys.exit(f"{PAGE.name} does not say what is counted now; run benchmarks/zero_page.py")
    if not given.check:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
