"""Measures every way to carry out a collective on gloo, and prints the table of `meshwright/comm/algorithms.py` anew.

    python benchmarks/gloo_algorithms.py [--ranks 2 4] [--sizes 65536 1048576] [--repeats 21] [--dtype float32]

The ways take turns, so that a machine that is busy for a while is busy for all of them; a figure is the median over the
repeats, each of which takes as long as its slowest rank. Only the choice is meant to be copied: the milliseconds stand
beside it to show how much it matters.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.algorithms import Algorithm, candidates
from meshwright.comm.backend import Backend, gloo, gloo_device
from meshwright.comm.group import Reduction
from meshwright.comm.launch import launch
from meshwright.comm.ledger import Kind
from meshwright.comm.recipes import Recipes
from meshwright.comm.start import Start

KINDS = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER)
SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
GAIN = 0.85
"""An algorithm takes over from the one before it only where it needs less than this share of its time."""


@dataclass(frozen=True)
class Plan:
    """What is measured: payloads in bytes, of a dtype, so many times."""

    sizes: tuple[int, ...]
    repeats: int
    dtype: str


@dataclass(frozen=True)
class Row:
    """Median milliseconds of each way to carry out one kind, at one size."""

    kind: Kind
    payload: int
    milliseconds: Mapping[str, float]


def run_rank(start: Start, plan: Plan) -> None:
    """Measure all as one of the ranks; rank 0 prints."""
    store = dist.FileStore(start.rendezvous.removeprefix("file://"), start.ranks)
    backend = gloo(store, start.rank, start.ranks, gloo_device(True, ""), 120.0)
    recipes = Recipes(backend, start.rank, start.ranks)
    dtype = getattr(torch, plan.dtype)
    rows = []
    for kind in KINDS:
        for payload in plan.sizes:
            shard = torch.ones(payload // dtype.itemsize // start.ranks).to(dtype).zero_()  # whose sums stay zero
            acts = ways(recipes, kind, shard, shard.repeat(start.ranks))
            rows.append(Row(kind, payload, medians(backend, acts, plan.repeats)))
            if start.rank == 0:
                print(in_words(rows[-1], start.ranks), flush=True)
    if start.rank == 0:
        print("\n".join(table(rows, start.ranks)), flush=True)


def ways(recipes: Recipes, kind: Kind, shard: Tensor, whole: Tensor) -> dict[str, Callable[[], None]]:
    """Every way to carry out `kind`, by its name."""

    def one_step(algorithm: Algorithm) -> None:
        match kind:
            case Kind.ALL_REDUCE:
                recipes.all_reduce(algorithm, whole, Reduction.SUM).wait()
            case Kind.REDUCE_SCATTER:
                recipes.reduce_scatter(algorithm, whole, shard).wait()
            case _:
                recipes.all_gather(algorithm, shard, whole).wait()

    def two_steps() -> None:  # cannot be had as a recipe, see there; measured to know what that costs
        recipes.reduce_scatter(Algorithm.ALL_TO_ALL, whole, shard).wait()
        recipes.all_gather(Algorithm.MESSAGES, shard, whole).wait()

    found: dict[str, Callable[[], None]] = {each: partial(one_step, each) for each in candidates(kind)}
    return found | {"two steps": two_steps} if kind is Kind.ALL_REDUCE else found


def medians(backend: Backend, acts: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Milliseconds of each act, which take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(repeats + 2):
        for name, act in acts.items():
            taken = slowest(backend, act)
            if turn >= 2:  # the first ones meet cold memory
                seconds[name].append(taken)
    return {name: 1e3 * statistics.median(taken) for name, taken in seconds.items()}


def slowest(backend: Backend, act: Callable[[], None]) -> float:
    """Seconds until the last rank has done `act`, which all begin together."""
    backend.barrier().wait()
    begun = time.perf_counter()
    act()
    taken = torch.tensor([time.perf_counter() - begun])
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    backend.allreduce([taken], options).wait()
    return taken.item()


def in_words(row: Row, ranks: int) -> str:
    """A line with all figures."""
    figures = "  ".join(f"{name} {figure:8.3f}" for name, figure in row.milliseconds.items())
    return f"# {ranks} ranks  {row.kind:<15}{row.payload / 2**20:7.3f} MB  ms: {figures}"


def table(rows: list[Row], ranks: int) -> Iterator[str]:
    """The lines of `TABLE` that these figures stand for."""
    for kind in KINDS:
        current: Algorithm | None = None
        for row in (row for row in rows if row.kind is kind):
            best = min(candidates(kind), key=row.milliseconds.__getitem__)
            if current is None or row.milliseconds[best] < GAIN * row.milliseconds[current]:
                least = row.payload if current is not None else 0
                yield f"    Choice(Kind.{kind.name}, {ranks}, {least}, Algorithm.{best.name}),"
                current = best


def main() -> None:
    """Measure on each number of ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    for ranks in given.ranks:
        launch(run_rank, Plan(tuple(given.sizes), given.repeats, given.dtype), ranks)


if __name__ == "__main__":
    main()
