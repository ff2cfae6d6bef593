"""Every algorithm computes what its collective means, in place and not, and the same bits on every rank."""

from __future__ import annotations

from itertools import count

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.comm.algorithms import Algorithm, candidates
from meshwright.comm.backend import gloo, gloo_device
from meshwright.comm.connect import Groups
from meshwright.comm.group import Reduction
from meshwright.comm.ledger import Kind
from meshwright.comm.recipes import Recipes, Spare
from meshwright.layout.mesh import Mesh
from pool import RankPool

NUMBERS = count()
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)


def recipes(groups: Groups, name: str) -> Recipes:
    assert groups.wiring is not None
    store = dist.PrefixStore(name, groups.wiring.store)
    return Recipes(
        gloo(store, groups.rank, groups.mesh.size, gloo_device(True, ""), 20.0), groups.rank, groups.mesh.size
    )


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, (numel,), generator=generator).to(dtype)  # whose sums are exact in every dtype


def every_algorithm(groups: Groups, name: str, cases: list[tuple[int, int, torch.dtype]]) -> None:
    ways = recipes(groups, name)
    for shard, extra, dtype in cases:
        whole = [values(rank, groups.mesh.size * shard + extra, dtype) for rank in range(groups.mesh.size)]
        check_all_reduce(ways, groups.rank, whole)
        if shard:
            check_shards(ways, groups.rank, [each[: groups.mesh.size * shard] for each in whole], shard)


def check_all_reduce(ways: Recipes, rank: int, whole: list[Tensor]) -> None:
    expected = {Reduction.SUM: torch.stack(whole).sum(0).to(whole[0].dtype), Reduction.MAX: torch.stack(whole).amax(0)}
    for algorithm in candidates(Kind.ALL_REDUCE):
        for reduction, result in expected.items():
            mine = whole[rank].clone()
            ways.all_reduce(algorithm, mine, reduction).wait()
            assert torch.equal(mine, result), (algorithm, reduction)


def check_shards(ways: Recipes, rank: int, whole: list[Tensor], shard: int) -> None:
    own = slice(rank * shard, (rank + 1) * shard)
    summed = torch.stack(whole).sum(0).to(whole[0].dtype)
    for algorithm in candidates(Kind.REDUCE_SCATTER):
        part = torch.zeros_like(summed[own])
        ways.reduce_scatter(algorithm, whole[rank].clone(), part).wait()
        assert torch.equal(part, summed[own]), algorithm
        mine = whole[rank].clone()
        ways.reduce_scatter(algorithm, mine, mine[own]).wait()
        assert torch.equal(mine[own], summed[own]), algorithm
    for algorithm in candidates(Kind.ALL_GATHER):
        gathered = torch.zeros_like(summed)
        ways.all_gather(algorithm, summed[own].clone(), gathered).wait()
        assert torch.equal(gathered, summed), algorithm
        gathered.zero_()[own] = summed[own]
        ways.all_gather(algorithm, gathered[own], gathered).wait()
        assert torch.equal(gathered, summed), algorithm


@pytest.mark.ranks
@settings(max_examples=6, deadline=None)
@given(
    ranks=st.integers(2, 4),
    cases=st.lists(
        st.tuples(st.sampled_from((0, 1, 5, 1000)), st.integers(1, 3), st.sampled_from(DTYPES)), min_size=1, max_size=6
    ),
)
def test_every_algorithm_equals_the_sum_of_all_values(
    pool: RankPool, ranks: int, cases: list[tuple[int, int, torch.dtype]]
) -> None:
    # A name that was used before would lead to addresses where nobody listens any more.
    pool.run(Mesh(data=ranks), every_algorithm, f"recipes-{next(NUMBERS)}", cases)


def rounded(groups: Groups) -> list[Tensor]:
    ways = recipes(groups, "rounded")
    mine = torch.randn(3000, generator=torch.Generator().manual_seed(groups.rank)).bfloat16()
    results = []
    for algorithm in candidates(Kind.ALL_REDUCE):
        results.append(mine.clone())
        ways.all_reduce(algorithm, results[-1], Reduction.SUM).wait()
    return results


@pytest.mark.ranks
def test_every_rank_gets_the_same_bits(pool: RankPool) -> None:
    first, *others = pool.run(Mesh(data=4), rounded)
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))


def awaited_in_any_order(groups: Groups) -> None:
    ways = recipes(groups, "any-order")
    tensors = [torch.full((1001,), float(groups.rank + step)) for step in range(6)]
    algorithms = [Algorithm.NATIVE, Algorithm.MESSAGES] * 3
    started = [ways.all_reduce(each, tensor, Reduction.SUM) for each, tensor in zip(algorithms, tensors, strict=True)]
    for each in started if groups.rank else reversed(started):
        each.wait()
    for step, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((1001,), 3.0 + 3 * step))


@pytest.mark.ranks
def test_each_rank_may_wait_in_its_own_order(pool: RankPool) -> None:
    pool.run(Mesh(data=3), awaited_in_any_order)


def test_a_buffer_that_was_given_back_is_taken_again() -> None:
    spare = Spare()
    first = spare.take(2, 100, torch.float32)
    address = first.data_ptr()
    second = spare.take(2, 100, torch.float32)
    assert second.data_ptr() != address, "it is in use"
    spare.give(first)
    assert spare.take(4, 10, torch.float64).data_ptr() == address
