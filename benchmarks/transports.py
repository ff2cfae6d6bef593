"""How long collectives and messages take through shared memory, beside plain gloo and beside what the memory allows.

    python benchmarks/transports.py [--ranks 2 4] [--sizes 64 3] [--repeats 15] [--json]

Both transports and the copy that measures the memory take turns in one run, so that a machine that is busy for a while
is busy for all of them. A figure is the median over the repeats, of which each takes as long as its slowest rank. Plain
gloo is what `torch.distributed` does by itself. The limit is the time in which the machine moves the bytes that no
algorithm can avoid, all ranks at once, at the rate of copies of the same size: every byte that has to be read from or
written to a tensor counts once, what passes through a cache on the way does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.connect import Groups, connect
from meshwright.comm.group import Reduction
from meshwright.comm.launch import launch
from meshwright.comm.start import Start
from meshwright.layout.mesh import Mesh

MESSAGE = 0.8
"""Size of a message in MB."""

WARM = 3
"""Turns that are not counted: they meet cold memory."""

Act = Callable[[], None]


@dataclass(frozen=True)
class Plan:
    """What is measured: sizes in MB of float32, so many times; and the file for the results."""

    sizes: tuple[float, ...]
    repeats: int
    results: str


@dataclass(frozen=True)
class Case:
    """One thing to do, both ways, and the bytes that a rank must read and write for it."""

    name: str
    megabytes: float
    ours: Act
    gloo: Act
    traffic: int


@dataclass(frozen=True)
class Row:
    """Median milliseconds of a case."""

    name: str
    ranks: int
    megabytes: float
    ours: float
    gloo: float
    limit: float


def collectives(groups: Groups, megabytes: float) -> Iterator[Case]:
    """Every collective over the data axis on tensors of that size in all."""
    group, ranks = groups.data, groups.data.size
    shard = int(megabytes * 2**20 / 4) // ranks
    whole = shard * ranks
    own = slice(group.index * shard, (group.index + 1) * shard)
    private, shared, common = torch.ones(whole), group.buffer(whole, torch.float32), group.whole(whole, torch.float32)
    part, target, plain = torch.ones(shard), torch.ones(whole), torch.ones(whole)
    shared.zero_()
    common[own].zero_()

    def case(name: str, ours: Act, gloo: Act, traffic: int) -> Case:
        return Case(name, megabytes, ours, gloo, 4 * traffic)

    def scatter() -> None:
        dist.reduce_scatter_tensor(part, plain)

    def gather() -> None:
        dist.all_gather_into_tensor(target, part)

    def reduce() -> None:
        dist.all_reduce(plain)
        plain.fill_(1.0)

    def reduced(tensor: Tensor) -> Act:
        def act() -> None:
            group.all_reduce(tensor, label="benchmark")
            tensor.fill_(1.0)

        return act

    label = "benchmark"
    yield case(
        "reduce-scatter, shared", lambda: group.reduce_scatter(shared, part, label=label), scatter, whole + shard
    )
    yield case(
        "reduce-scatter, private", lambda: group.reduce_scatter(private, part, label=label), scatter, whole + shard
    )
    yield case("all-gather, in the whole", lambda: group.all_gather(common[own], common, label=label), gather, 0)
    yield case(
        "all-gather, shared shards", lambda: group.all_gather(shared[own], target, label=label), gather, 2 * whole
    )
    yield case("all-gather, private", lambda: group.all_gather(part, target, label=label), gather, 2 * whole)
    yield case("all-reduce, shared", reduced(shared), reduce, 3 * whole)
    yield case("all-reduce, private", reduced(private), reduce, 3 * whole)
    yield case(
        "broadcast, private",
        lambda: group.broadcast(target, 0, label=label),
        lambda: dist.broadcast(target, 0),
        whole,
    )


def messages(groups: Groups) -> Iterator[Case]:
    """A message from each rank with an even number to the next, and one back."""
    numel = int(MESSAGE * 2**20 / 4)
    out, back = torch.ones(numel), torch.ones(numel)
    rank = groups.rank
    peer = rank ^ 1

    def ours() -> None:
        for turn in (0, 1):
            if rank % 2 == turn:
                groups.activations.send(out, peer).wait()
            else:
                groups.activations.receive(back, peer).wait()

    def gloo() -> None:
        for turn in (0, 1):
            if rank % 2 == turn:
                dist.send(out, peer)
            else:
                dist.recv(back, peer)

    yield Case("message there and back", 2 * MESSAGE, ours, gloo, 2 * 2 * 4 * numel)


def measured(case: Case, groups: Groups, repeats: int) -> Row:
    """Our way, gloo's, and a copy of the same size, taking turns."""
    source = torch.ones(int(case.megabytes * 2**20 / 4))
    target = torch.ones_like(source)
    acts = (case.ours, case.gloo, lambda: target.copy_(source))
    taken: list[list[float]] = [[] for _ in acts]
    for turn in range(WARM + repeats):
        for act, seconds in zip(acts, taken, strict=True):
            groups.world.barrier()
            begun = time.perf_counter()
            act()
            slowest = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
            groups.world.all_reduce(slowest, label="time", reduction=Reduction.MAX)
            if turn >= WARM:
                seconds.append(slowest.item())
    ours, gloo, copy = (1e3 * statistics.median(seconds) for seconds in taken)
    limit = copy * case.traffic / (2 * 4 * source.numel())
    return Row(case.name, groups.mesh.size, case.megabytes, ours, gloo, limit)


def run_rank(start: Start, plan: Plan) -> None:
    """Measure all as one of the ranks; rank 0 prints, and leaves the rows in the file of the plan."""
    cpu = torch.device("cpu")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{plan.results}.gloo-{start.ranks}", start.ranks),
        rank=start.rank,
        world_size=start.ranks,
    )
    stages = Start(start.rank, start.ranks, start.rank, start.ranks, f"{start.rendezvous}-stages", 0, agent_store=False)
    data = connect(Mesh(data=start.ranks), start, cpu, transport="shared")
    pipeline = connect(Mesh(pipeline=start.ranks), stages, cpu, transport="shared")
    cases: list[tuple[Groups, Callable[[], Iterator[Case]]]] = [
        (data, lambda size=size: collectives(data, size))
        for size in plan.sizes  # type: ignore[misc]
    ]
    cases.append((pipeline, lambda: messages(pipeline)))
    rows = [measured(case, groups, plan.repeats) for groups, each in cases for case in each()]
    if start.rank == 0:
        Path(plan.results).write_text(json.dumps([asdict(row) for row in rows]))
    dist.destroy_process_group()


def in_words(row: Row) -> str:
    """A line with the figures of a case."""
    share = f"{row.limit / row.ours:6.2f}" if row.limit else "     -"
    return (
        f"{row.ranks} ranks {row.megabytes:6.1f} MB  {row.name:<27}{row.ours:9.3f} ms   gloo {row.gloo:9.3f} ms "
        f"({row.gloo / row.ours:6.1f} x)   limit {row.limit:8.3f} ms (reached {share})"
    )


def main() -> None:
    """Measure on each number of ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=float, nargs="+", default=[64.0, 3.0], help="MB")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, milliseconds")
    given = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in given.ranks:
            results = Path(folder) / f"results-{ranks}"
            launch(run_rank, Plan(tuple(given.sizes), given.repeats, str(results)), ranks)
            rows += [Row(**row) for row in json.loads(results.read_text())]
    print(json.dumps([asdict(row) for row in rows]) if given.json else "\n".join(map(in_words, rows)))


if __name__ == "__main__":
    main()
