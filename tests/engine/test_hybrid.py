"""Model states in runs of data ranks that are replicas of each other (HSDP), prefetch, offload: on real ranks."""

from __future__ import annotations

import pytest
import torch

from meshwright.comm.connect import Groups
from meshwright.comm.ledger import Kind
from meshwright.costs.sheet import parameters
from meshwright.costs.spec import GPTSpec
from meshwright.costs.traffic import of_layout
from meshwright.engine.build import build
from meshwright.layout.layout import Layout
from meshwright.layout.share import micro_batch_samples
from meshwright.model.batch import MicroBatch
from meshwright.train.parity import Case, Deviations, deviations
from pool import RankPool

LAYOUTS = tuple(
    map(
        Layout.parse,
        [
            "dp4/zero1/shard2/m3",
            "dp4/zero2/shard2/m3",
            "dp4/zero3/shard2/m3",
            "dp4/zero3/shard2/prefetch3/recompute-full/gpipe/m2",
            "dp4/zero2/shard2/offload/m2",
            "dp4/zero3/shard1/m2",
            "dp4/zero0/shard2/m2",
            "dp4/zero3/prefetch0/offload",
        ],
    )
)
SPEC = GPTSpec(layers=2, hidden=32, heads=4, sequence=8, vocabulary=64, tied=False)


@pytest.fixture(params=["shared", "gloo"])
def pool(request: pytest.FixtureRequest, pool: RankPool, gloo_pool: RankPool) -> RankPool:
    """What is computed depends on no transport."""
    return {"shared": pool, "gloo": gloo_pool}[request.param]


def every_layout(groups: Groups) -> dict[str, Deviations]:
    spec = GPTSpec(layers=3, hidden=8, heads=4, sequence=5, vocabulary=13, dropout=0.2)
    return {str(layout): deviations(groups, Case(spec), layout) for layout in LAYOUTS}


def test_replicated_runs_prefetch_and_offload_compute_what_one_process_does(pool: RankPool) -> None:
    for name, result in pool.run(LAYOUTS[0].mesh, every_layout)[0].items():
        assert result.largest <= 1e-10, f"{name}: {result}"


def tied_over_two_stages(groups: Groups, layout: Layout) -> Deviations:
    return deviations(groups, Case(GPTSpec(layers=2, hidden=8, heads=4, sequence=5, vocabulary=13)), layout)


@pytest.mark.slow
def test_a_tie_over_two_stages_is_summed_over_the_replicas_too(pool: RankPool) -> None:
    layout = Layout.parse("dp4.pp2/zero3/shard2/prefetch2/m3")
    assert pool.run(layout.mesh, tied_over_two_stages, layout)[0].largest <= 1e-10


def sent(groups: Groups, layout: Layout) -> tuple[int, int]:
    """Bytes that this rank sends in a step: to the ranks of its run and to its replicas."""
    engine = build(SPEC, layout, groups, lambda runs: torch.optim.SGD(runs, lr=0.1))
    tokens = torch.arange(8 * SPEC.sequence).view(8, -1) % SPEC.vocabulary
    groups.ledger.clear()
    parts = micro_batch_samples(8, layout, groups.data.index)
    engine.step([MicroBatch(tokens[part.start : part.stop], tokens[part.start : part.stop]) for part in parts], 0.1)
    states = [(entry, tally.sent) for entry, tally in groups.ledger if entry.label in ("gradients", "parameters")]
    return sum(bytes_ for _, bytes_ in states), groups.ledger.total(Kind.ALL_REDUCE, axis="replica").sent


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_runs_of_shards_and_their_replicas_send_what_the_formula_says(gloo_pool: RankPool, zero: int, m: int) -> None:
    layout = Layout(data=4, zero=zero, micro_batches=m, shard=2)  # type: ignore[arg-type]
    expected = of_layout(parameters(SPEC), layout)
    for inside, between in gloo_pool.run(layout.mesh, sent, layout):
        assert (inside, between) == (4 * expected.shards, 4 * expected.replicas)
