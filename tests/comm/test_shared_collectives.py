"""Collectives through shared memory equal what they mean, for any mesh, dtype, size, place and order of waits."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import assert_never

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.comm.connect import Groups
from meshwright.comm.group import Group, Handle, Reduction
from meshwright.comm.ledger import Kind
from meshwright.comm.shared.group import SharedGroup
from meshwright.layout.mesh import Mesh
from pool import RankPool

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.bool)
KINDS = tuple(kind for kind in Kind if kind not in (Kind.SEND, Kind.RECEIVE))


@dataclass(frozen=True)
class Deed:
    """One collective: `numel` elements per shard, in memory that is "private", a "buffer" or the common "whole"."""

    kind: Kind
    axis: str
    numel: int
    dtype: torch.dtype
    place: str
    reduction: Reduction
    seed: int


@pytest.fixture(scope="session")
def shared() -> RankPool:
    """Ranks that must share memory: no fallback would do."""
    ranks = RankPool(transport="shared", timeout=60)
    yield ranks
    ranks.close()


def values(deed: Deed, numel: int, rank: int) -> Tensor:
    """What `rank` gives."""
    dice = torch.Generator().manual_seed(deed.seed * 1009 + rank)
    if deed.dtype in FLOATS:
        return torch.randn(numel, generator=dice, dtype=torch.float64).to(deed.dtype)
    if deed.dtype is torch.bool:
        return torch.rand(numel, generator=dice) < 0.3
    return torch.randint(-(2**40), 2**40, (numel,), generator=dice)


def check_combined(deed: Deed, found: Tensor, given: list[Tensor]) -> None:
    """Against the sum or maximum in float64; a sum of narrow numbers is rounded once, from float32."""
    stack = torch.stack(given)
    if deed.kind is Kind.ALL_REDUCE and deed.reduction is Reduction.MAX:
        assert torch.equal(found, stack.amax(0)), deed
    elif deed.dtype in FLOATS:
        stack = stack.double()
        wide = torch.finfo(torch.float64 if deed.dtype is torch.float64 else torch.float32).eps
        slack = torch.finfo(deed.dtype).eps / 2 * stack.sum(0).abs() + len(given) * wide * stack.abs().sum(0)
        assert bool(((found.double() - stack.sum(0)).abs() <= slack).all()), deed
    else:
        assert torch.equal(found, stack.any(0) if deed.dtype is torch.bool else stack.sum(0)), deed


class Doing:
    """A deed on one rank: its tensors, its start, and the check of what came out."""

    def __init__(self, groups: Groups, deed: Deed) -> None:
        self.deed = deed
        self.group: Group = getattr(groups, deed.axis)
        n, shard = self.group.size, deed.numel
        self.whole = shard if deed.kind is Kind.BROADCAST else shard * n
        self.own = slice(self.group.index * shard, (self.group.index + 1) * shard)
        self.root = deed.seed % n
        gathers = deed.kind is Kind.ALL_GATHER or (deed.kind is Kind.BROADCAST and deed.place == "whole")
        self.memory = self._memory(gathers)
        self.target = self.memory
        self.source = self.memory
        self.given: list[Tensor] = []

    def _memory(self, gathers: bool) -> Tensor:
        match self.deed.place:
            case "whole" if gathers and isinstance(self.group, SharedGroup):
                return self.group.whole(self.whole, self.deed.dtype)
            case "private":
                return torch.empty(self.whole, dtype=self.deed.dtype)
            case _:
                return self.group.buffer(self.whole + 3, self.deed.dtype)[3:]

    def start(self) -> Handle | None:
        """Fill in what this rank gives, and begin."""
        deed, group = self.deed, self.group
        per_rank = deed.numel if deed.kind is Kind.ALL_GATHER else self.whole
        self.given = [values(deed, per_rank, rank) for rank in group.ranks]
        mine = self.given[group.index]
        match deed.kind:
            case Kind.ALL_REDUCE:
                self.memory.copy_(mine)
                return group.start_all_reduce(self.memory, label="deed", reduction=deed.reduction)
            case Kind.REDUCE_SCATTER:
                self.memory.copy_(mine)
                in_place = deed.seed % 2 == 0
                self.target = self.memory[self.own] if in_place else torch.empty(deed.numel, dtype=deed.dtype)
                return group.start_reduce_scatter(self.memory, self.target, label="deed")
            case Kind.ALL_GATHER:
                self.source = self.memory[self.own] if deed.seed % 2 == 0 else torch.empty(deed.numel, dtype=deed.dtype)
                self.source.copy_(mine)
                return group.start_all_gather(self.source, self.memory, label="deed")
            case Kind.ALL_TO_ALL:
                self.memory.copy_(mine)
                self.target = torch.empty(self.whole, dtype=deed.dtype)
                return group.start_all_to_all(self.memory, self.target, label="deed")
            case Kind.BROADCAST:
                if group.index == self.root or deed.place != "whole":
                    self.memory.copy_(mine)
                return group.start_broadcast(self.memory, self.root, label="deed")
            case Kind.BARRIER:
                group.barrier()
                return None
            case _:
                raise AssertionError(deed.kind)

    def result(self) -> Tensor:
        """What came out, once it is right."""
        match self.deed.kind:
            case Kind.ALL_REDUCE:
                check_combined(self.deed, self.memory, self.given)
            case Kind.REDUCE_SCATTER:
                check_combined(self.deed, self.target, [each[self.own] for each in self.given])
                return self.target.clone()
            case Kind.ALL_GATHER:
                assert torch.equal(self.memory, torch.cat(self.given)), self.deed
            case Kind.BROADCAST:
                assert torch.equal(self.memory, self.given[self.root]), self.deed
            case Kind.BARRIER:
                return torch.empty(0)
            case Kind.ALL_TO_ALL:
                assert torch.equal(self.target, torch.cat([each[self.own] for each in self.given])), self.deed
                return self.target.clone()
            case Kind.SEND | Kind.RECEIVE as kind:
                raise AssertionError(kind)
            case kind:
                assert_never(kind)
        return self.memory.clone()


def doings(groups: Groups, deeds: list[Deed], seed: int) -> list[bytes]:
    """Start all deeds, wait for them in an order of this rank's own, check each; the bits of all results."""
    under_way = [Doing(groups, deed) for deed in deeds]
    handles = [doing.start() for doing in under_way]
    order = list(range(len(deeds)))
    random.Random(seed + groups.rank).shuffle(order)
    for place in order:
        handle = handles[place]
        if handle is not None:
            handle.wait()
    results = [doing.result() for doing in under_way]
    groups.world.barrier()  # nobody writes into a whole that another one still compares
    return [result.view(torch.uint8).numpy().tobytes() for result in results]


def twice(groups: Groups, deeds: list[Deed], seed: int) -> None:
    """The same bits, whatever the order of the waits."""
    assert isinstance(groups.world, SharedGroup)
    assert doings(groups, deeds, seed) == doings(groups, deeds, seed + 1)


sizes = st.one_of(st.integers(0, 40), st.integers(900, 3000), st.sampled_from([16384, 100_003, 400_000]))
deeds = st.builds(
    Deed,
    st.sampled_from(KINDS),
    st.sampled_from(["data", "pipeline", "tensor", "world"]),
    sizes,
    st.sampled_from(DTYPES),
    st.sampled_from(["private", "buffer", "whole"]),
    st.sampled_from(Reduction),
    st.integers(0, 1000),
)
meshes = st.sampled_from([Mesh(2), Mesh(3), Mesh(4), Mesh(2, 1, 2), Mesh(5), Mesh(3, 2, 1), Mesh(2, 2, 2), Mesh(8)])
once = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.ranks
@once
@given(meshes, st.lists(deeds, min_size=1, max_size=6), st.integers(0, 1000))
def test_whatever_is_under_way_and_awaited_in_any_order_equals_float64_and_itself(
    shared: RankPool, mesh: Mesh, drawn: list[Deed], seed: int
) -> None:
    shared.run(mesh, twice, drawn, seed)


def many(groups: Groups) -> None:
    """More than the board has room for, all under way at once."""
    tensors = [torch.full((100 * (1 + number % 3),), float(groups.rank + number)) for number in range(100)]
    handles = [groups.data.start_all_reduce(tensor, label="many") for tensor in tensors]
    order = list(range(100))
    random.Random(groups.rank).shuffle(order)
    for number in order:
        handles[number].wait()
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full_like(tensor, 3.0 + 3 * number))


@pytest.mark.ranks
def test_more_operations_may_be_under_way_than_there_is_room_for(shared: RankPool) -> None:
    shared.run(Mesh(3), many)


def crossed(groups: Groups) -> None:
    """Each rank waits first for what others wait for last."""
    large = [torch.ones(300_000) for _ in range(3)]
    three = (groups.data, groups.tensor, groups.world)
    handles = [group.start_all_reduce(tensor, label="x") for group, tensor in zip(three, large, strict=True)]
    for place in range(3):
        handles[(place + groups.rank) % 3].wait()
    assert [tensor[-1].item() for tensor in large] == [2.0, 2.0, 4.0]


@pytest.mark.ranks
def test_ranks_that_wait_for_different_groups_do_each_others_part_meanwhile(shared: RankPool) -> None:
    shared.run(Mesh(2, 1, 2), crossed)


def with_gaps(groups: Groups) -> None:
    gaps = torch.zeros(8, 2)[:, 0]
    full = torch.zeros(4)
    with pytest.raises(ValueError, match=r"reduce-scatter of x: the tensor \(8,\) is not contiguous"):
        groups.data.reduce_scatter(gaps, full, label="x")
    with pytest.raises(ValueError, match=r"all-gather of x: .* is not contiguous"):
        groups.data.all_gather(full, gaps, label="x")
    with pytest.raises(ValueError, match=r"broadcast of x: .* is not contiguous"):
        groups.data.broadcast(gaps, 0, label="x")
    with pytest.raises(ValueError, match="complex64 does not travel between ranks; these do: float64"):
        groups.data.broadcast(torch.zeros(2, dtype=torch.complex64), 0, label="x")
    groups.data.barrier()  # the refused calls are not among the operations of the group


@pytest.mark.ranks
def test_tensors_with_gaps_or_of_a_strange_dtype_are_refused(shared: RankPool) -> None:
    shared.run(Mesh(2), with_gaps)


def in_the_whole(groups: Groups) -> tuple[list[float], int, float]:
    group = groups.data
    whole = group.whole(4000, torch.float32)
    shard = whole.view(group.size, -1)[group.index]
    shard.fill_(float(groups.rank))
    group.all_gather(shard, whole, label="parameters")
    seen = whole.view(group.size, -1)[:, 0].tolist()
    group.barrier()
    shard.add_(10.0)  # no gather: it is the same memory
    group.barrier()
    return seen, whole.untyped_storage().nbytes(), whole[0].item()


@pytest.mark.ranks
def test_a_whole_is_one_memory_for_all_members_with_a_storage_of_its_size(shared: RankPool) -> None:
    for seen, nbytes, first in shared.run(Mesh(4), in_the_whole):
        assert seen == [0, 1, 2, 3]
        assert nbytes == 16_000
        assert first == 10.0


def reused(groups: Groups) -> tuple[int, int]:
    """Bytes taken from the arena after the first round and after many."""
    assert groups.wiring is not None and groups.wiring.host is not None
    arena, group = groups.wiring.host.arena, groups.data
    taken = []
    for turn in range(20):
        buffer, whole = group.buffer(50_000, torch.float32), group.whole(70_000, torch.float32)
        group.all_gather(buffer[:35_000], whole, label="x")
        group.barrier()
        del buffer, whole
        group.barrier()
        if turn in (2, 19):
            taken.append(arena.taken)
    return taken[0], taken[1]


@pytest.mark.ranks
def test_memory_that_nobody_uses_any_more_is_handed_out_again(shared: RankPool) -> None:
    for early, late in shared.run(Mesh(2), reused):
        assert early == late
