"""The passes that lower a schedule to a program: each adds one kind of action and knows one rule.

    F3@1 B3@1                                the ops of a rank
    F3@1.4 F3@1.5 B3@1.5 B3@1.4              by_layer        ops become layers (forward up, backward down)
    ... R3@1.5 B3@1.5 R3@1.4 B3@1.4          recomputed      each layer once more before its backward
    ... R3@1.5 RECV B3@2 from 2 B3@1.5 ...   with_messages   between ranks; a recompute does not wait for the gradient
    ... B3@1.5 REDUCE 5 ...                  reduced         gradients over the ranks that divide the states
    ... B3@1.4 SYNC 5 REDUCE 4 ...           synced          HSDP: then over the replicas
    ... GATHER 5 R3@1.5 ... B3@1.5 RELEASE 5 gathered        ZeRO 3: whole while in use
    ... GATHER 5 GATHER 4 R3@1.5 ...         prefetched      ... and on the way while the layers before it compute
    ... TIE tied STEP GATHER 4 ...           stepped         tied gradients, optimizer, ZeRO 1 and 2 gather

`lower` composes them for a layout; each is pure and can be read alone. They write verbs and run none. GPipe, section
2.3 (recompute); ZeRO, sections 5 and 7 (when states are divided and what that sends).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from meshwright.layout.layout import Layout
from meshwright.layout.layout import Recompute as RecomputeMode
from meshwright.layout.zero import ZeroStage, row
from meshwright.schedule.cut import Cut
from meshwright.schedule.op import Kind, Op, needs
from meshwright.schedule.program import (
    Action,
    Backward,
    Forward,
    Gather,
    Program,
    Receive,
    Recompute,
    Reduce,
    Release,
    Send,
    Step,
    Sync,
    Tied,
)
from meshwright.schedule.schedule import Schedule

Actions: TypeAlias = tuple[Action, ...]
Inserted: TypeAlias = Callable[[int, Action], Iterable[Action]]
"""What to put next to an action, given its index and itself."""


def lower(schedule: Schedule, rank: int, cut: Cut, layout: Layout) -> Program:
    """The program of pipeline rank `rank`, in which `layout` decides on ZeRO, replicas, prefetch and recompute.

    The schedule need not be the layout's own: evaluation has another. Raises ValueError where the cut and the schedule
    disagree on the stages.
    """
    if cut.stages != schedule.stages:
        raise ValueError(
            f"the cut has {cut.stages} stages and the schedule {schedule.stages}; cut into {schedule.stages}"
        )
    actions = by_layer(schedule.ranks[rank], cut)
    if layout.recompute is RecomputeMode.FULL:
        actions = recomputed(actions)
    actions = with_messages(actions, schedule, rank)
    zero = layout.effective_zero
    actions = reduced(actions, cut, zero)
    if layout.replicas > 1:
        actions = synced(actions)
    if row(zero).parameters:
        actions = prefetched(gathered(actions, cut), layout.prefetch)
    if schedule.trains:
        actions = stepped(actions, schedule, rank, cut, zero)
    return Program(rank, actions)


def by_layer(ops: Iterable[Op], cut: Cut) -> Actions:
    """Each op as actions of its stage's layers: a forward goes from the first to the last, a backward back."""

    def layered(op: Op) -> Iterable[Action]:
        if op.kind is Kind.FORWARD:
            return (Forward(op, layer) for layer in cut.layers(op.stage))
        return (Backward(op, layer) for layer in reversed(cut.layers(op.stage)))

    return tuple(action for op in ops for action in layered(op))


def recomputed(actions: Actions) -> Actions:
    """Each layer computed once more right before its backward, so that one layer's activations are alive at a time."""

    def before(_: int, action: Action) -> Iterable[Action]:
        if isinstance(action, Backward):
            yield Recompute(Op(Kind.FORWARD, action.op.micro_batch, action.op.stage), action.layer)

    return _weave(actions, before=before)


def with_messages(actions: Actions, schedule: Schedule, rank: int) -> Actions:
    """Receive before an op's first layer what it needs from another rank; send after its last what another rank needs.

    A recompute that stands before the first backward layer stays before the message: it needs no gradient, and so fills
    the wait (GPipe, section 2.3).
    """
    incoming: dict[Op, list[Receive]] = defaultdict(list)
    outgoing: dict[Op, list[Send]] = defaultdict(list)
    for op in (op for ops in schedule.ranks for op in ops):
        for need in needs(op, schedule.stages):
            producer, consumer = schedule.rank_of(need.stage), schedule.rank_of(op.stage)
            if producer != consumer:
                incoming[op].append(Receive(need, producer))
                outgoing[need].append(Send(need, consumer))
    first: dict[Op, int] = {}
    last: dict[Op, int] = {}
    for index, action in enumerate(actions):
        if isinstance(action, Forward | Backward):
            first.setdefault(action.op, index)
            last[action.op] = index

    def before(index: int, action: Action) -> Iterable[Action]:
        if isinstance(action, Forward | Backward) and first[action.op] == index:
            yield from incoming[action.op]

    def after(index: int, action: Action) -> Iterable[Action]:
        if isinstance(action, Forward | Backward) and last[action.op] == index:
            yield from outgoing[action.op]

    return _weave(actions, before, after)


def reduced(actions: Actions, cut: Cut, zero: ZeroStage) -> Actions:
    """Reduce each unit after the last backward that adds to its gradient.

    ZeRO 0 and 1 keep the whole gradient and reduce it once, with the last micro-batch. ZeRO 2 and 3 may not hold it
    beyond one micro-batch, and reduce with each.
    """
    each = row(zero).gradients

    def sum_of(unit: str, op: Op) -> tuple[str, int | None]:
        """What is reduced at once: a unit's gradient of one micro-batch, or of all."""
        return unit, op.micro_batch if each else None

    last = {
        sum_of(unit, action.op): index
        for index, action in enumerate(actions)
        if isinstance(action, Backward)
        for unit in cut.units(action.layer)
    }

    def after(index: int, action: Action) -> Iterable[Action]:
        if isinstance(action, Backward):
            yield from (Reduce(unit) for unit in cut.units(action.layer) if last[sum_of(unit, action.op)] == index)

    return _weave(actions, after=after)


def synced(actions: Actions) -> Actions:
    """Sum each unit's gradient over the replicas, once per step: behind its last reduction, and one backward later.

    That backward is the time the reduction has to end in, as what is summed is its result (HSDP).
    """
    last = {action.unit: index for index, action in enumerate(actions) if isinstance(action, Reduce)}
    reducing: list[str] = []

    def after(index: int, action: Action) -> Iterable[Action]:
        if isinstance(action, Backward):
            yield from map(Sync, reducing)
            reducing.clear()
        elif isinstance(action, Reduce) and last[action.unit] == index:
            reducing.append(action.unit)

    return (*_weave(actions, after=after), *map(Sync, reducing))


def gathered(actions: Actions, cut: Cut) -> Actions:
    """Gather a layer's units right before it is computed and release them right after.

    From a recompute to its backward they stay whole: one gather serves both.
    """
    kept = {(action.op.micro_batch, action.layer) for action in actions if isinstance(action, Recompute)}

    def before(_: int, action: Action) -> Iterable[Action]:
        match action:
            case Forward(_, layer) | Recompute(_, layer):
                yield from map(Gather, cut.units(layer))
            case Backward(op, layer) if (op.micro_batch, layer) not in kept:
                yield from map(Gather, cut.units(layer))
            case _:
                pass

    def after(_: int, action: Action) -> Iterable[Action]:
        if isinstance(action, Forward | Backward):
            yield from map(Release, cut.units(action.layer))

    return _weave(actions, before, after)


def prefetched(actions: Actions, depth: int) -> Actions:
    """Start each gather before the computation `depth` uses of a layer earlier, so that it is under way meanwhile.

        depth 0   GATHER 0 F0@0.0 RELEASE 0 GATHER 1 F0@0.1 RELEASE 1 GATHER 2 F0@0.2 ...
        depth 1   GATHER 0 GATHER 1 F0@0.0 RELEASE 0 GATHER 2 F0@0.1 RELEASE 1 ...

    A use is a forward, or a backward with its recompute; at most depth + 1 layers are whole or on their way. No gather
    moves before the release of the same unit.
    """
    others: list[Action] = []
    gathers: dict[int, list[Gather]] = defaultdict(list)
    """The gathers of each use, by the place among `others` of the use's first computation."""
    for action in actions:
        if isinstance(action, Gather):
            gathers[len(others)].append(action)
        else:
            others.append(action)
    places = list(gathers)
    started: dict[int, list[Gather]] = defaultdict(list)
    free: dict[str, int] = {}
    """Unit -> the first use that its next gather may stand before: the one behind its release."""
    for use, place in enumerate(places):
        for gather in gathers[place]:
            start = max(use - depth, free.get(gather.unit, 0))
            started[places[start]].append(gather)
            free[gather.unit] = use + 1
    return _weave(others, before=lambda index, _: started[index])


def stepped(actions: Actions, schedule: Schedule, rank: int, cut: Cut, zero: ZeroStage) -> Actions:
    """The end of a step: sum tied gradients over their stages, update, gather the weights that are held whole.

    ZeRO 1 and 2 update 1/d of the weights on each rank and hold them whole, hence gather; 0 has all, 3 gathers at use.
    """
    stages = [stage for stage in range(cut.stages) if schedule.rank_of(stage) == rank]
    holders = {tie.name: {schedule.rank_of(stage) for stage in cut.tie_stages(tie)} for tie in cut.ties}
    ties = (Tied(name) for name, ranks in holders.items() if rank in ranks and len(ranks) > 1)
    sharding = row(zero)
    units = cut.units_of_stages(stages) if sharding.optimizer and not sharding.parameters else ()
    return (*actions, *ties, Step(), *map(Gather, units))


def _weave(actions: Sequence[Action], before: Inserted | None = None, after: Inserted | None = None) -> Actions:
    """The actions with others put before and after each."""
    woven: list[Action] = []
    for index, action in enumerate(actions):
        woven += before(index, action) if before else ()
        woven.append(action)
        woven += after(index, action) if after else ()
    return tuple(woven)
