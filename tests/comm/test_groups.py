"""Groups and channels: every collective equals what it means, wrong shards are refused, and everything is counted."""

from __future__ import annotations

import pytest
import torch

from meshwright.comm.connect import Groups, solo
from meshwright.comm.group import Group, Reduction
from meshwright.comm.ledger import Entry, Kind, Ledger
from meshwright.layout.mesh import Mesh
from pool import RankFailedError, RankPool

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


@pytest.fixture(params=["shared", "gloo"])
def pool(request: pytest.FixtureRequest, pool: RankPool, gloo_pool: RankPool) -> RankPool:
    """Everything here holds on every transport."""
    return {"shared": pool, "gloo": gloo_pool}[request.param]


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, different on each rank, exact in every dtype."""
    return ((torch.arange(numel) * 7 + 3 * rank) % 11).to(dtype)


def collectives(group: Group, shard: int) -> None:
    """Every collective on this rank, against what the values of all ranks say it must be."""
    for dtype in DTYPES:
        whole = [values(rank, shard * group.size, dtype) for rank in range(group.size)]
        mine = whole[group.index]

        summed = mine.clone()
        group.all_reduce(summed, label="test")
        assert torch.equal(summed, torch.stack(whole).sum(0).to(dtype))

        largest = mine.clone()
        group.all_reduce(largest, label="test", reduction=Reduction.MAX)
        assert torch.equal(largest, torch.stack(whole).amax(0) if shard else largest)

        part = torch.empty(shard, dtype=dtype)
        group.reduce_scatter(mine.clone(), part, label="test")
        span = slice(group.index * shard, (group.index + 1) * shard)
        assert torch.equal(part, summed[span])

        in_place = mine.clone()
        group.reduce_scatter(in_place, in_place[span], label="test")
        assert torch.equal(in_place[span], part)

        gathered = torch.full((shard * group.size,), -1).to(dtype)
        group.all_gather(part, gathered, label="test")
        assert torch.equal(gathered, summed)
        group.all_gather(gathered[span], gathered, label="test")
        assert torch.equal(gathered, summed)

        exchanged = torch.full_like(mine, -1)
        group.all_to_all(mine, exchanged, label="test")
        assert torch.equal(exchanged, torch.cat([each[span] for each in whole]))

        source = group.size - 1
        sent = mine.clone()
        group.broadcast(sent, source, label="test")
        assert torch.equal(sent, whole[source])
    group.barrier()


def every_group(groups: Groups, shard: int) -> None:
    for group in (groups.data, groups.pipeline, groups.tensor, groups.world):
        collectives(group, shard)


@pytest.mark.parametrize("shard", [0, 1, 5, 4096, 700_001])
@pytest.mark.parametrize("mesh", [Mesh(3, 1, 1), Mesh(2, 1, 2), Mesh(1, 4, 1)], ids=str)
def test_every_collective_on_every_axis_computes_what_it_says(pool: RankPool, mesh: Mesh, shard: int) -> None:
    pool.run(mesh, every_group, shard)


def test_a_solo_group_is_the_identity_and_counts_nothing() -> None:
    groups = solo()
    collectives(groups.tensor, 5)
    assert groups.ledger.total().calls == 0


def several_at_once(groups: Groups) -> None:
    tensors = [torch.full((1000,), float(groups.rank + step)) for step in range(10)]
    handles = [groups.data.start_all_reduce(tensor, label="test") for tensor in tensors]
    for handle in handles:
        handle.wait()
        handle.wait()  # waiting twice is harmless
    for step, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((1000,), 1.0 + 2 * step))


def test_several_collectives_may_be_under_way(pool: RankPool) -> None:
    pool.run(Mesh(data=2), several_at_once)


def wrong_shard(groups: Groups) -> str:
    with pytest.raises(ValueError, match=r"does not make") as raised:
        groups.data.all_gather(torch.zeros(3), torch.zeros(7), label="parameters")
    with pytest.raises(ValueError, match=r"torch.float64"):
        groups.data.all_gather(torch.zeros(3), torch.zeros(6, dtype=torch.float64), label="parameters")
    with pytest.raises(ValueError, match=r"not contiguous"):
        groups.data.all_reduce(torch.zeros(4, 4).t(), label="gradients")
    return str(raised.value)


def test_a_shard_that_does_not_fit_is_refused_before_it_reaches_the_backend(pool: RankPool) -> None:
    text = pool.run(Mesh(data=2), wrong_shard)[0]
    assert "parameters in data group (0, 1): a shard of 3" in text


def counted(groups: Groups) -> list[tuple[Entry, int, int, int]]:
    groups.data.all_reduce(torch.zeros(8), label="gradients")
    groups.data.all_reduce(torch.zeros(8), label="gradients")
    groups.data.reduce_scatter(torch.zeros(8), torch.zeros(2), label="gradients")
    groups.data.all_gather(torch.zeros(2), torch.zeros(8), label="parameters")
    return [(entry, tally.calls, tally.payload, tally.sent) for entry, tally in groups.ledger]


def test_the_ledger_counts_calls_payload_and_the_bytes_a_rank_sends(pool: RankPool) -> None:
    for rows in pool.run(Mesh(data=4), counted):
        assert rows == [
            (Entry(Kind.ALL_GATHER, "data", "parameters"), 1, 32, 24),
            (Entry(Kind.ALL_REDUCE, "data", "gradients"), 2, 64, 96),
            (Entry(Kind.REDUCE_SCATTER, "data", "gradients"), 1, 32, 24),
        ]


def test_totals_of_the_ledger_take_any_filter() -> None:
    ledger = Ledger()
    ledger.count(Entry(Kind.SEND, "pipeline", "activations"), 10, 2)
    ledger.count(Entry(Kind.SEND, "pipeline", "gradients"), 5, 2)
    assert ledger.total(label="gradients").sent == 5
    assert ledger.total(kind=Kind.SEND).payload == 15
    assert ledger.total(axis="data").calls == 0


def relay(groups: Groups) -> list[float]:
    """Messages both ways at once; each direction arrives in the order it was sent, and empty ones need no message."""
    below, above = groups.pipeline.index - 1, groups.pipeline.index + 1
    handles = []
    received: list[float] = []
    for number in range(5):
        if above < groups.pipeline.size:
            handles.append(groups.activations.send(torch.full((3,), float(number)), above))
            handles.append(groups.activations.send(torch.zeros(0, 3), above))
        if below >= 0:
            handles.append(groups.gradients.send(torch.full((3,), -float(number)), below))
    for channel, peer in ((groups.activations, below), (groups.gradients, above)):
        for _ in range(5 if 0 <= peer < groups.pipeline.size else 0):
            buffer = torch.empty(3)
            channel.receive(buffer, peer).wait()
            channel.receive(torch.zeros(0, 3), peer).wait()
            received.append(buffer[0].item())
    for handle in handles:
        handle.wait()
    return received


def test_each_direction_of_the_pipeline_arrives_in_the_order_it_was_sent(pool: RankPool) -> None:
    first, middle, last = pool.run(Mesh(pipeline=3), relay)
    assert last == [0, 1, 2, 3, 4]
    assert first == [0, -1, -2, -3, -4]
    assert middle == [0, 1, 2, 3, 4, 0, -1, -2, -3, -4]


def in_runs_of(groups: Groups, shard: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    divided = groups.sharded(shard)
    again = groups.sharded(shard)
    assert shard == 1 or (again.shards is divided.shards and again.gathers() is divided.gathers())
    for group in (divided.shards, divided.replicas, divided.gathers()):
        collectives(group, 5)
    assert divided.gathers().ranks == divided.shards.ranks
    return divided.shards.ranks, divided.replicas.ranks


@pytest.mark.parametrize("shard", [1, 2, 4])
def test_the_data_axis_comes_in_runs_that_are_made_once(pool: RankPool, shard: int) -> None:
    mesh = Mesh(data=4)
    for _ in range(2):
        answers = pool.run(mesh, in_runs_of, shard)
        assert answers == [(mesh.shard_group(rank, shard), mesh.replica_group(rank, shard)) for rank in range(4)]


def undivided(groups: Groups) -> None:
    divided = groups.sharded(groups.data.size)
    for each in (groups, divided):
        assert each.shards is groups.data
        assert each.replicas.size == 1
        assert each.gathers() is not groups.data or groups.data.size == 1


def test_all_data_ranks_in_one_run_are_the_data_group(pool: RankPool) -> None:
    pool.run(Mesh(data=2, tensor=2), undivided)
    undivided(solo())


def out_of_step(groups: Groups) -> tuple[float, float, list[str]]:
    """Two gathers and two reductions, started in other orders on the two groups, all under way at once."""
    divided = groups.sharded(2)
    gathers, rank = divided.gathers(), divided.shards.index
    summed = [torch.full((1000,), float(rank + step)) for step in range(2)]
    wholes = [torch.empty(2000) for _ in range(2)]
    acts = [lambda step=step: divided.shards.start_all_reduce(summed[step], label="gradients") for step in range(2)]
    acts += [
        lambda step=step: gathers.start_all_gather(torch.full((1000,), float(step)), wholes[step], label="parameters")
        for step in range(2)
    ]
    # Within a group the order is the same on every rank; between the two groups it need not be.
    order = (0, 2, 1, 3) if rank == 0 else (2, 3, 0, 1)
    handles = [acts[index]() for index in order]
    for handle in handles:
        handle.wait()
    axes = sorted({entry.axis for entry, _ in groups.ledger})
    return float(summed[1].sum()), float(wholes[1].sum()), axes


def test_gathers_and_reductions_are_under_way_on_two_groups(pool: RankPool) -> None:
    assert pool.run(Mesh(data=4), out_of_step) == [(3000.0, 2000.0, ["gather", "shard"])] * 4


def test_runs_that_do_not_divide_the_data_axis_are_refused() -> None:
    with pytest.raises(ValueError, match="runs of 2 ranks do not divide 1 data ranks; try 1"):
        solo().sharded(2)


def alone(groups: Groups) -> None:
    if groups.rank == 0:
        groups.data.all_reduce(torch.zeros(4), label="gradients")


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_rank_that_waits_in_vain_says_where_for_what_and_how_long(transport: str) -> None:
    impatient = RankPool(timeout=1.0, transport=transport)
    try:
        with pytest.raises(
            RankFailedError, match=r"rank 0 in data group \(0, 1\): all-reduce of gradients failed after"
        ):
            impatient.run(Mesh(data=2), alone)
    finally:
        impatient.close()
