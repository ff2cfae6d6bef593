"""Debug mode: ranks that call different things all hear of it, with both calls and both places, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.comm.checked import SIGNATURE, CheckedGroup
from meshwright.comm.collectives import sum_gradient_over_group
from meshwright.comm.connect import Groups
from meshwright.comm.group import CommunicationError, Group, MismatchError, Reduction, SoloGroup
from meshwright.layout.mesh import Mesh
from pool import RankPool

Call = Callable[[Group], None]


def checked(groups: Groups) -> CheckedGroup:
    assert groups.wiring is not None
    return CheckedGroup(groups.data, groups.wiring.store)


def all_reduce(group: Group) -> None:
    group.all_reduce(torch.zeros(4, 3), label="gradients")


def other_dtype(group: Group) -> None:
    group.all_reduce(torch.zeros(4, 3, dtype=torch.float64), label="gradients")


def more_elements(group: Group) -> None:
    group.all_reduce(torch.zeros(40, 30), label="gradients")


def no_elements(group: Group) -> None:
    group.all_reduce(torch.zeros(0, 3), label="gradients")


def other_shape(group: Group) -> None:
    group.all_reduce(torch.zeros(3, 4), label="gradients")


def with_gaps(group: Group) -> None:
    group.all_reduce(torch.zeros(3, 4).t(), label="gradients")


def other_reduction(group: Group) -> None:
    group.all_reduce(torch.zeros(4, 3), label="gradients", reduction=Reduction.MAX)


def other_label(group: Group) -> None:
    group.all_reduce(torch.zeros(4, 3), label="loss")


def broadcast(group: Group) -> None:
    group.broadcast(torch.zeros(4, 3), 0, label="gradients")


def broadcast_from_another(group: Group) -> None:
    group.broadcast(torch.zeros(4, 3), 1, label="gradients")


def reduce_scatter(group: Group) -> None:
    group.reduce_scatter(torch.zeros(12 * group.size), torch.zeros(12), label="gradients")


def wrong_shard(group: Group) -> None:
    group.reduce_scatter(torch.zeros(12 * group.size), torch.zeros(13), label="gradients")


def all_gather(group: Group) -> None:
    group.all_gather(torch.zeros(12), torch.zeros(12 * group.size), label="gradients")


def barrier(group: Group) -> None:
    group.barrier()


def whole(group: Group) -> None:
    group.whole(12, torch.float32)


def larger_whole(group: Group) -> None:
    group.whole(13, torch.float32)


def from_two_lines(group: Group) -> None:
    if group.index == 0:
        all_reduce(group)
    else:
        group.all_reduce(torch.zeros(4, 3), label="gradients")


def mismatched(groups: Groups, first: Call, others: Call) -> str:
    group = checked(groups)
    with pytest.raises(MismatchError) as raised:
        (first if group.index == 0 else others)(group)
    # Nothing was sent that should not have been, so whoever catches the error can go on.
    tensor = torch.full((5,), 1.0 + group.index)
    group.all_reduce(tensor, label="afterwards")
    assert torch.equal(tensor, torch.full((5,), group.size * (group.size + 1) / 2))
    return str(raised.value)


PAIRS = [
    (all_reduce, other_dtype, "all-reduce of gradients (sum), (4, 3) float64"),
    (all_reduce, more_elements, "all-reduce of gradients (sum), (40, 30) float32"),
    (all_reduce, no_elements, "all-reduce of gradients (sum), (0, 3) float32"),
    (all_reduce, other_shape, "all-reduce of gradients (sum), (3, 4) float32"),
    (all_reduce, with_gaps, "all-reduce of gradients (sum), (4, 3) float32 with gaps"),
    (all_reduce, other_reduction, "all-reduce of gradients (max), (4, 3) float32"),
    (all_reduce, other_label, "all-reduce of loss (sum), (4, 3) float32"),
    (all_reduce, broadcast, "broadcast of gradients from index 0, (4, 3) float32"),
    (all_reduce, barrier, "barrier"),
    (broadcast, broadcast_from_another, "broadcast of gradients from index 1, (4, 3) float32"),
    (reduce_scatter, wrong_shard, "reduce-scatter of gradients, (24,) float32, (13,) float32"),
    (reduce_scatter, all_gather, "all-gather of gradients, (12,) float32, (24,) float32"),
    (barrier, all_gather, "all-gather of gradients, (12,) float32, (24,) float32"),
    (whole, larger_whole, "whole of 13 float32"),
    (from_two_lines, from_two_lines, "all-reduce of gradients (sum), (4, 3) float32"),
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("first", "second", "text"), PAIRS, ids=[f"{first.__name__}-{second.__name__}" for first, second, _ in PAIRS]
)
def test_whatever_differs_is_named_on_every_rank(gloo_pool: RankPool, first: Call, second: Call, text: str) -> None:
    messages = gloo_pool.run(Mesh(data=2), mismatched, first, second)
    assert messages[0] == messages[1]
    heading, one, other = messages[0].splitlines()
    assert heading == "the ranks of data group (0, 1) call different things:"
    assert one.startswith("  rank 0: ")
    assert f"  rank 1: {text}, at {__file__}:" in other
    assert one.rpartition(":")[2] != other.rpartition(":")[2]


@pytest.mark.ranks
def test_ranks_that_call_the_same_are_named_together(gloo_pool: RankPool) -> None:
    messages = gloo_pool.run(Mesh(data=4), mismatched, reduce_scatter, all_gather)
    assert len(set(messages)) == 1
    assert "\n  rank 0: reduce-scatter of gradients, (48,) float32" in messages[0]
    assert "\n  ranks 1, 2, 3: all-gather of gradients, (12,) float32" in messages[0]


def calls(group: Group, reductions: int) -> None:
    all_gather(group)
    for _ in range(reductions):
        all_reduce(group)
    barrier(group)


def one_call_more(groups: Groups) -> str:
    group = checked(groups)
    with pytest.raises(MismatchError) as raised:
        calls(group, 1 + group.index)
    return str(raised.value)


@pytest.mark.ranks
def test_a_rank_that_skipped_a_call_is_found_at_the_next_one(gloo_pool: RankPool) -> None:
    text = gloo_pool.run(Mesh(data=2), one_call_more)[0]
    assert "rank 0: barrier, at" in text
    assert "rank 1: all-reduce of gradients" in text


def the_same(groups: Groups) -> list[int]:
    group = checked(groups)
    n, index = group.size, group.index
    whole = torch.arange(2.0 * n)
    summed = whole.clone()
    under_way = group.start_all_reduce(summed, label="test")
    part = torch.empty(2)
    group.reduce_scatter(whole.clone(), part, label="test")
    gathered = torch.empty(2 * n)
    group.all_gather(part, gathered, label="test")
    sent = torch.full((3,), float(index))
    group.broadcast(sent, n - 1, label="test")
    group.barrier()
    under_way.wait()
    assert torch.equal(summed, n * whole)
    assert torch.equal(part, n * whole[2 * index : 2 * index + 2])
    assert torch.equal(gathered, n * whole)
    assert torch.equal(sent, torch.full((3,), n - 1.0))
    return [groups.ledger.total(label=label).calls for label in ("test", SIGNATURE)]


@pytest.mark.ranks
def test_the_same_calls_compute_what_they_say_and_cost_one_exchange_each(gloo_pool: RankPool) -> None:
    assert gloo_pool.run(Mesh(data=3), the_same) == [[4, 5]] * 3


def backward(groups: Groups) -> str:
    group = checked(groups)
    x = torch.ones(3 + group.index, requires_grad=True)
    y = sum_gradient_over_group(x, group)
    with pytest.raises(MismatchError) as raised:
        y.sum().backward()
    return str(raised.value)


@pytest.mark.ranks
def test_a_call_from_autograd_stands_at_the_line_that_ran_the_backward_pass(gloo_pool: RankPool) -> None:
    text = gloo_pool.run(Mesh(data=2), backward)[0]
    line = 1 + Path(__file__).read_text().splitlines().index("        y.sum().backward()")
    assert text.count(f"{__file__}:{line}") == 2


def absent(groups: Groups) -> str:
    if groups.rank == 1:
        return ""
    with pytest.raises(CommunicationError) as raised:
        all_reduce(checked(groups))
    return str(raised.value)


@pytest.mark.ranks
def test_a_rank_that_nobody_joins_says_what_it_waited_in() -> None:
    impatient = RankPool(timeout=1.0)
    try:
        text = impatient.run(Mesh(data=2), absent)[0]
    finally:
        impatient.close()
    assert "rank 0 in data group (0, 1) waited for the other ranks to call\n  all-reduce of gradients" in text
    assert __file__ in text


def test_one_rank_is_always_of_one_mind() -> None:
    group = CheckedGroup(SoloGroup("data"), torch.distributed.HashStore())
    target = torch.empty(12)
    group.all_gather(torch.arange(12.0), target, label="test")
    assert torch.equal(target, torch.arange(12.0))
    group.barrier()
