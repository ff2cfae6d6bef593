"""Examines the communication of one rank: does every collective compute what it means, and how long does it take.

What is found goes to a file (`diagnosis.py`), because a result that travelled over the groups under examination would
prove nothing. Not a benchmark of one transport against another: it measures the groups that a run would use, in the
way that it would use them, while all other ranks do the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import assert_never

import torch
from torch import Tensor

from meshwright.comm.channel import Channel
from meshwright.comm.connect import Groups, connect
from meshwright.comm.diagnosis import Examination, Measurement, RankReport
from meshwright.comm.group import Group, Reduction
from meshwright.comm.ledger import Kind
from meshwright.comm.start import Start

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
ODD = (1, 5, 4099)
"""Elements of the shards whose results are checked in every dtype; those that are timed are checked in float32."""

COLLECTIVES = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.BROADCAST)

_COPY, _COPIES = 32 * 2**20, 4
_LABEL = "doctor"


def run_rank(start: Start, examination: Examination) -> None:
    """Examine as one of the ranks, and leave the report."""
    groups = connect(examination.mesh, start, torch.device("cpu"))
    report = RankReport(copy_rate(groups, examination.repeats), tuple(measurements(groups, examination)))
    report.write(examination.report(start.rank))


def copy_rate(groups: Groups, repeats: int) -> float:
    """Bytes per second that this rank copies, while all do, from and to memory that no cache holds."""
    source, target = torch.ones(_COPY, dtype=torch.uint8), torch.ones(_COPY, dtype=torch.uint8)

    def copies() -> None:
        for _ in range(_COPIES):
            target.copy_(source)
        groups.world.barrier()  # where ranks share cores, the last one's time counts

    return _COPIES * _COPY / _median(groups, copies, repeats)


def measurements(groups: Groups, examination: Examination) -> Iterator[Measurement]:
    """Every collective on every axis with more than one rank, and the messages of the pipeline."""
    repeats = examination.repeats
    for group in (groups.data, groups.pipeline, groups.tensor):
        if group.size == 1:
            continue
        transport = "shared memory" if group.shares_memory else "gloo"
        for kind in COLLECTIVES:
            wrong = tuple(wrong_results(group, kind))
            for payload in examination.payloads:
                shard = max(1, payload // torch.float32.itemsize // group.size)
                seconds = _median(groups, call(group, kind, shard), repeats)
                wrong += _wrong(group, kind, shard, torch.float32)
                nbytes = shard * group.size * torch.float32.itemsize
                yield Measurement(group.axis, group.size, transport, kind, nbytes, seconds, wrong)
                wrong = ()
        yield Measurement(group.axis, group.size, transport, Kind.BARRIER, 0, _median(groups, group.barrier, repeats))
        if group is groups.pipeline:
            yield from _messages(groups, examination, transport)


# --- collectives -------------------------------------------------------------------------------------------------


def call(group: Group, kind: Kind, shard: int) -> Callable[[], None]:
    """The collective to time, over n float32 shards of `shard` elements: sums in buffers, as gradients are."""
    whole = group.buffer(group.size * shard, torch.float32).fill_(0)
    part = torch.zeros(shard)
    match kind:
        case Kind.ALL_REDUCE:
            return lambda: group.all_reduce(whole, label=_LABEL)
        case Kind.REDUCE_SCATTER:
            return lambda: group.reduce_scatter(whole, part, label=_LABEL)
        case Kind.ALL_GATHER:
            return lambda: group.all_gather(part, whole, label=_LABEL)
        case Kind.BROADCAST:
            return lambda: group.broadcast(whole, 0, label=_LABEL)
        case Kind.ALL_TO_ALL:
            taken = torch.empty_like(whole)
            return lambda: group.all_to_all(whole, taken, label=_LABEL)
        case Kind.BARRIER | Kind.SEND | Kind.RECEIVE:
            raise AssertionError(kind)
        case _:
            assert_never(kind)


def wrong_results(group: Group, kind: Kind) -> Iterator[str]:
    """What is wrong with small tensors of every dtype."""
    for dtype in DTYPES:
        for shard in ODD:
            yield from _wrong(group, kind, shard, dtype)


def _wrong(group: Group, kind: Kind, shard: int, dtype: torch.dtype) -> tuple[str, ...]:
    if is_right(group, kind, shard, dtype):
        return ()
    return (f"{group.where}: {kind} of {group.size} x {shard} {str(dtype).removeprefix('torch.')} elements is wrong",)


def is_right(group: Group, kind: Kind, shard: int, dtype: torch.dtype) -> bool:
    """Whether a collective over n shards of `shard` elements gives what all ranks' values say it must."""
    everyones = torch.stack([_values(index, group.size * shard, dtype) for index in range(group.size)])
    mine = everyones[group.index].clone()
    own = slice(group.index * shard, (group.index + 1) * shard)
    match kind:
        case Kind.ALL_REDUCE:
            largest = mine.clone()
            group.all_reduce(mine, label=_LABEL)
            group.all_reduce(largest, label=_LABEL, reduction=Reduction.MAX)
            return torch.equal(mine, everyones.sum(0).to(dtype)) and torch.equal(largest, everyones.amax(0))
        case Kind.REDUCE_SCATTER:
            part = torch.zeros_like(mine[own])
            group.reduce_scatter(mine, part, label=_LABEL)
            return torch.equal(part, everyones.sum(0).to(dtype)[own])
        case Kind.ALL_GATHER:
            whole = torch.zeros_like(mine)
            group.all_gather(everyones[0][own].clone(), whole, label=_LABEL)
            return torch.equal(whole, everyones[0])
        case Kind.BROADCAST:
            group.broadcast(mine, group.size - 1, label=_LABEL)
            return torch.equal(mine, everyones[-1])
        case Kind.ALL_TO_ALL:
            taken = torch.empty_like(mine)
            group.all_to_all(mine, taken, label=_LABEL)
            return torch.equal(taken, everyones[:, own].reshape(-1))
        case Kind.BARRIER | Kind.SEND | Kind.RECEIVE:
            raise AssertionError(kind)
        case _:
            assert_never(kind)


def _values(index: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, different on each rank, whose sums are exact in every dtype."""
    return ((torch.arange(numel) * 7 + 2 * index) % 3).to(dtype)


# --- messages ----------------------------------------------------------------------------------------------------


def _messages(groups: Groups, examination: Examination, transport: str) -> Iterator[Measurement]:
    """Messages from every stage to the next, timed; and to the one before, which are only checked."""
    line = groups.pipeline
    for payload in examination.payloads:
        numel = max(1, payload // torch.float32.itemsize)
        down = Passing(groups.activations, 1, numel)
        seconds = _median(groups, down.act, examination.repeats)
        up = Passing(groups.gradients, -1, numel)
        up.act()
        wrong = tuple(
            f"{line.where}: a message of {numel} float32 {passing.channel.label} is wrong"
            for passing in (down, up)
            if not passing.is_right()
        )
        yield Measurement(line.axis, line.size, transport, Kind.SEND, numel * torch.float32.itemsize, seconds, wrong)


class Passing:
    """A message from every stage of `channel` to the one `step` further, if there is one."""

    def __init__(self, channel: Channel, step: int, numel: int) -> None:
        self.channel = channel
        self._stages = range(len(channel.ranks))
        self._to, self._from = channel.index + step, channel.index - step
        self._sent = _values(channel.index, numel, torch.float32)
        self._received = torch.zeros(numel)

    def act(self) -> None:
        """Send and receive."""
        handles = []
        if self._from in self._stages:
            handles.append(self.channel.receive(self._received, self._from))
        if self._to in self._stages:
            handles.append(self.channel.send(self._sent, self._to))
        for handle in handles:
            handle.wait()

    def is_right(self) -> bool:
        """Whether what has arrived here is what was sent."""
        expected = _values(self._from, self._received.numel(), torch.float32)
        return self._from not in self._stages or torch.equal(self._received, expected)


def _median(groups: Groups, act: Callable[[], object], repeats: int) -> float:
    """Seconds of `act` on this rank; all ranks begin together. The first time meets cold memory and does not count."""
    taken = []
    for _ in range(repeats + 1):
        groups.world.barrier()
        begun = time.perf_counter()
        act()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:])
