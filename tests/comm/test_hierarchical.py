"""A group over several hosts computes what one flat group computes, and sends less between the hosts.

The hosts are simulated: some ranks of the pool are taken to be elsewhere. `test_two_hosts.py` has network namespaces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from host_groups import hierarchical
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.comm.connect import Groups, solo
from meshwright.comm.group import Reduction, SoloGroup
from meshwright.comm.hierarchical import HierarchicalGroup
from meshwright.comm.hosts import Hosts
from meshwright.comm.ledger import Entry, Kind, Ledger
from meshwright.layout.mesh import Mesh
from pool import RankFailedError, RankPool

pytestmark = pytest.mark.ranks

# 2 hosts with 2, 3 and 4 ranks; with neighbours on one host, with neighbours apart, and without any order.
HOSTS = ("aabb", "abab", "aaabbb", "abbaab", "aaaabbbb")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def values(rank: int, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    numbers = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + rank), dtype=torch.float64)
    return numbers > 1 if dtype is torch.bool else (5 * numbers).to(dtype)


def close(result: Tensor, exact: Tensor, magnitude: Tensor) -> bool:
    """Equal, up to the rounding of each addition in the result's own dtype."""
    if not result.dtype.is_floating_point:
        return torch.equal(result, exact.to(result.dtype))
    rounding = 8 * torch.finfo(result.dtype).eps * magnitude
    return bool(((result.double() - exact).abs() <= rounding).all())


@dataclass(frozen=True)
class Sizes:
    """Elements: of a shard, and how many more an all-reduce has than the ranks divide."""

    shard: int
    extra: int


def against_float64(
    groups: Groups, names: str, within: str, sizes: Sizes, dtype: torch.dtype, seed: int
) -> list[Tensor]:
    group = hierarchical(groups, names, within)
    shard, extra = sizes.shard, sizes.extra
    n, index = group.size, group.index
    whole = [values(rank, n * shard + extra, dtype, seed) for rank in range(n)]
    exact = torch.stack(whole).double().sum(0)
    magnitude = torch.stack(whole).double().abs().sum(0)

    summed = whole[index].clone()
    group.all_reduce(summed, label="test")
    assert close(summed, exact, magnitude)
    largest = whole[index].clone()
    group.all_reduce(largest, label="test", reduction=Reduction.MAX)
    assert torch.equal(largest, torch.stack(whole).amax(0))

    mine = whole[index][: n * shard]
    own = slice(index * shard, (index + 1) * shard)
    part = torch.empty(shard, dtype=dtype)
    group.reduce_scatter(mine.clone(), part, label="test")
    assert close(part, exact[own], magnitude[own])
    in_place = mine.clone()
    group.reduce_scatter(in_place, in_place[own], label="test")
    assert torch.equal(in_place[own], part)

    exchanged = torch.empty_like(mine)
    group.all_to_all(mine.clone(), exchanged, label="test")
    assert torch.equal(exchanged, torch.cat([each[own] for each in whole]))

    expected = torch.cat([values(rank, shard, dtype, seed + 1) for rank in range(n)])
    gathered = torch.zeros(n * shard, dtype=dtype)
    group.all_gather(expected[own].clone(), gathered, label="test")
    assert torch.equal(gathered, expected)
    gathered.zero_()[own] = expected[own]
    group.all_gather(gathered[own], gathered, label="test")
    assert torch.equal(gathered, expected)

    source = seed % n
    sent = whole[index].clone()
    group.broadcast(sent, source, label="test")
    assert torch.equal(sent, whole[source])
    group.barrier()
    return [summed, largest]


@settings(max_examples=40, deadline=None)
@given(
    names=st.sampled_from(HOSTS),
    within=st.sampled_from(("gloo", "shared")),
    sizes=st.builds(Sizes, st.sampled_from((0, 1, 2, 7, 300, 3000)), st.integers(0, 7)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_every_collective_equals_a_float64_reference(
    pool: RankPool, names: str, within: str, sizes: Sizes, dtype: torch.dtype, seed: int
) -> None:
    results = pool.run(Mesh(data=len(names)), against_float64, names, within, sizes, dtype, seed)
    for others in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results[0], others, strict=True)), "bit by bit"


def awaited_in_any_order(groups: Groups) -> None:
    group = hierarchical(groups, "aabb")
    whole = torch.arange(8.0)
    tensors = [torch.full((1001,), float(group.index + step)) for step in range(6)]
    parts = [torch.empty(2) for _ in range(6)]
    handles = []
    for tensor, part in zip(tensors, parts, strict=True):
        handles.append(group.start_all_reduce(tensor, label="test"))
        handles.append(group.start_reduce_scatter(whole.clone(), part, label="test"))
    for handle in handles if group.index % 2 else reversed(handles):
        handle.wait()
        handle.wait()  # waiting twice is harmless
    for step, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((1001,), 6.0 + 4 * step))
    for part in parts:
        assert torch.equal(part, 4 * whole[2 * group.index : 2 * group.index + 2])


def test_several_may_be_under_way_and_each_rank_waits_in_its_own_order(pool: RankPool) -> None:
    pool.run(Mesh(data=4), awaited_in_any_order)


def counted(groups: Groups) -> tuple[list[tuple[Entry, int, int]], int, int]:
    group = hierarchical(groups, "aabb")
    group.all_reduce(torch.zeros(16), label="gradients")
    group.reduce_scatter(torch.zeros(16), torch.zeros(4), label="gradients")
    group.all_gather(torch.zeros(4), torch.zeros(16), label="parameters")
    rows = [(entry, tally.calls, tally.sent) for entry, tally in groups.ledger]
    return rows, group.inner.ledger.total().sent, group.between_hosts.sent


def test_the_ledger_counts_the_whole_as_if_it_were_flat_and_the_parts_apart(pool: RankPool) -> None:
    for rows, inner, outer in pool.run(Mesh(data=4), counted):
        assert rows == [
            (Entry(Kind.ALL_GATHER, "data", "parameters"), 1, 48),
            (Entry(Kind.ALL_REDUCE, "data", "gradients"), 1, 96),
            (Entry(Kind.REDUCE_SCATTER, "data", "gradients"), 1, 48),
        ]
        assert inner == (32 + 32) + 32 + 32  # of 64 bytes: half in the reduce-scatter, half in the all-gather
        assert outer == 32 + 16 + 16  # a shard of 32 bytes is all-reduced; 16 bytes are sent for each of the others


def with_gradient(groups: Groups) -> None:
    group = hierarchical(groups, "aabb")
    leaf = torch.ones(6, requires_grad=True)
    with torch.no_grad():
        group.all_reduce(leaf, label="test")
    assert torch.equal(leaf, torch.full((6,), 4.0))
    with torch.inference_mode():
        fresh = torch.ones(6)
        group.all_reduce(fresh, label="test")
        assert torch.equal(fresh, torch.full((6,), 4.0))
    with pytest.raises(ValueError, match=r"not contiguous"):
        group.all_reduce(torch.zeros(4, 4).t(), label="test")
    with pytest.raises(ValueError, match=r"does not make"):
        group.all_gather(torch.zeros(3), torch.zeros(7), label="test")


def test_a_tensor_that_autograd_watches_is_as_good_as_any(pool: RankPool) -> None:
    pool.run(Mesh(data=4), with_gradient)


def alone(groups: Groups) -> None:
    group = hierarchical(groups, "aabb")
    if groups.rank != 3:
        group.all_reduce(torch.zeros(4), label="gradients")


def test_a_rank_that_waits_in_vain_says_in_which_group_and_in_which_part_of_it() -> None:
    impatient = RankPool(timeout=1.5)
    try:
        with pytest.raises(RankFailedError) as raised:
            impatient.run(Mesh(data=4), alone)
    finally:
        impatient.close()
    text = str(raised.value)
    assert "in data group (0, 1, 2, 3): all-reduce of gradients failed after waiting" in text
    assert re.search(r"data (within a host|between hosts) group \(\d, \d\): [a-z-]+ of gradients failed", text)


def test_hosts_with_different_numbers_of_ranks_are_refused() -> None:
    solo_group = SoloGroup("part")
    with pytest.raises(ValueError, match=r"data group \(0, 1, 2\): the hosts have 2, 1 ranks"):
        HierarchicalGroup("data", (0, 1, 2), Ledger(), Hosts.of("aab"), solo_group, solo_group)


def test_one_rank_on_one_host_is_the_identity() -> None:
    groups = solo()
    hosts = Hosts.of("a")
    group = HierarchicalGroup("data", (0,), groups.ledger, hosts, SoloGroup("inner"), SoloGroup("outer"))
    target = torch.empty(3)
    group.reduce_scatter(torch.arange(3.0), target, label="test")
    assert torch.equal(target, torch.arange(3.0))
    group.barrier()
