"""`meshwright train FILE`: trains what a TOML file describes, on ranks that it starts, or as the rank that it is."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from meshwright.cli.outcome import exit_code
from meshwright.comm.launch import launch
from meshwright.comm.start import Start
from meshwright.layout.layout import Layout
from meshwright.planner.rules import problems, warnings
from meshwright.train.config import Config, config_keys, load
from meshwright.train.data import Corpus, Sampler, held_out_windows


def _help_on_keys() -> str:
    """A line for each key of the configuration: its default, and what it is for."""
    rows = [(f"--{key.name}", _shown(key.default), key.about) for key in config_keys()]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    columns = max(first + second + 30, shutil.get_terminal_size().columns)
    lines = ["Keys of FILE, with their defaults; an option of the same name takes precedence over FILE.", ""]
    for name, default, about in rows:
        start = f"  {name:<{first}}  {default:<{second}}  "
        lines += textwrap.wrap(about, columns, initial_indent=start, subsequent_indent=" " * len(start))
    return "\n".join(lines)


def _shown(default: object) -> str:
    match default:
        case None | ():
            return "-"
        case bool():
            return str(default).lower()
        case _:
            return str(default)


app = App(
    name="train",
    usage="Usage: meshwright train FILE [--key value ...]",
    help_epilogue=_help_on_keys(),
    help_format="plaintext",
)


@app.default
def train(file: Path, /, *settings: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]) -> int:
    """Train the model that a TOML file describes, and save it in its run folder.

    Args:
        file: The configuration.
        settings: `--key value` for any of its keys.
    """
    config = load(file, settings)
    start = Start.from_environment(os.environ)
    layout = Layout.parse(config.layout)
    _check_ranks(config, layout, start)
    if start is None or start.rank == 0:
        for warning in warnings(layout, config.model, config.batch):
            print(f"warning: {warning}", file=sys.stderr)
    _check_text(config)
    if start is None:
        return exit_code(lambda: launch(run_rank, config, layout.ranks))
    return _run_as_rank(start, config)


def run_rank(start: Start, config: Config) -> None:
    """The trainer, imported where it runs: the fork server of the ranks has it, and this process never needs it."""
    from meshwright.train import trainer

    trainer.run_rank(start, config)


def _run_as_rank(start: Start, config: Config) -> int:
    """Train as a rank that torchrun or SLURM started, and leave what it needs to say which rank failed first."""
    from torch.distributed.elastic.multiprocessing.errors import record

    record(run_rank)(start, config)
    return 0


def _check_ranks(config: Config, layout: Layout, start: Start | None) -> None:
    if start is not None and start.ranks != layout.ranks:
        found = problems(layout, config.model, config.batch, start.ranks)
        raise ValueError(f"layout {layout}: " + "; ".join(map(str, found)))


def _check_text(config: Config) -> None:
    """Build the corpus once, before the ranks look for it, and find out here if it is too short."""
    corpus = Corpus.open(config.data)
    Sampler(corpus.train, config.model.sequence, config.seed)
    held_out_windows(corpus.held_out, config.model.sequence, 1)
