"""Makes the blocks of any module whole while they are used, under ZeRO stage 3 without shared memory.

      forward    need(block) ─ call ─ leave(block)      need(next) ...
      backward   need(block) when the gradient of its output is there ─ ... ─ leave(block) when that of its input is

Gathers are collective, but modules may do different things on different ranks: call the model more often, leave a block
out, use another one. So the ranks agree on three levels, each with one small message:

      meet       which pass is next: a rank that has nothing to compute takes part in the forward passes of the others
      follow     within a pass everybody gathers the same blocks in the order that was learned the first time; a rank
                 that leaves a block out gathers it all the same and lets go of it
      ask        what the order does not have: before every gather the ranks ask each other what they need. So it is in
                 a pass of which nothing is known; and at the end of every other, where a rank that has needed something
                 else has first gone through the rest of the order with the others. The order is then longer

While a block is used, the next `depth` of the order are on their way; so at most depth + 1 are whole, besides those
that enclose others or are shared (ZeRO, section 7.2.2, "spread across the entire forward propagation").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from meshwright.comm.group import CommunicationError, Group
from meshwright.parallel.unit import State, Unit

Order = tuple[int, ...]

_LONGEST = 6
"""An order longer than so many times the blocks is forgotten: it would gather too much that nobody needs."""


class Turn(IntEnum):
    """What a rank is about to do; of several, all do the highest first."""

    NOTHING = 0
    BACKWARD = 1
    EVALUATION = 2
    EVALUATION_WITH_GRAPH = 3
    TRAINING_WITHOUT_GRAPH = 4
    TRAINING = 5

    @classmethod
    def forward(cls, training: bool, graph: bool) -> Turn:
        """A forward pass."""
        if training:
            return cls.TRAINING if graph else cls.TRAINING_WITHOUT_GRAPH
        return cls.EVALUATION_WITH_GRAPH if graph else cls.EVALUATION

    @property
    def makes_graph(self) -> bool:
        """Whether a backward pass may follow."""
        return self in (Turn.TRAINING, Turn.EVALUATION_WITH_GRAPH)


@dataclass(frozen=True)
class PassKey:
    """What tells passes apart that may use blocks in different orders."""

    turn: Turn
    forwards: int = 0
    """Of a backward pass: the forward passes that it goes back through."""


@dataclass(frozen=True)
class GatheredBlock:
    """A block by its name, and its units."""

    name: str
    units: tuple[Unit, ...]

    @property
    def sharded(self) -> bool:
        """Whether it would have to be gathered."""
        return any(unit.state is State.SHARDED for unit in self.units)

    def start(self) -> None:
        """Begin to gather it."""
        for unit in self.units:
            if unit.state is State.SHARDED:
                unit.start_gather()

    def settle(self) -> None:
        """Wait until it is whole; modules read it."""
        for unit in self.units:
            unit.whole()
            unit.show()

    def release(self) -> None:
        """Give it back, if it is whole or on its way."""
        for unit in self.units:
            unit.settle()
            if unit.state is State.WHOLE:
                unit.hide()
                unit.release()


@dataclass
class _Pass:
    """One forward or backward pass under way."""

    key: PassKey
    order: Order
    asks: bool
    """Whether the rest of the pass is not in the order."""
    next: int = 0
    """The place in the order from which nothing has been gathered."""
    ahead: deque[int] = field(default_factory=deque)
    """Gathered before anybody needed them, in order."""
    taken: list[int] = field(default_factory=list)
    """What was asked for."""


class Gathering:
    """The blocks of one rank, which all ranks of `group` hold shards of."""

    def __init__(self, blocks: Sequence[GatheredBlock], group: Group, depth: int, device: torch.device) -> None:
        self.blocks = blocks
        self._group = group
        self._depth = depth
        self._device = device
        self._orders: dict[PassKey, Order] = {}
        self._pass: _Pass | None = None
        self._forwards = 0

    # --- passes ------------------------------------------------------------------------------------------------------

    def meet(self, turn: Turn, note: int = 0) -> bool:
        """Return when all ranks have come to `turn`, or take part in it; whether all who came have the same `note`.

        Raises:
            RuntimeError: others go backward, where this rank has nothing to do.
        """
        while True:
            own = torch.tensor([turn, note], device=self._device)
            everybody = own.new_empty(2 * self._group.size)
            self._group.all_gather(own, everybody, label="order")
            turns, notes = everybody.view(-1, 2).unbind(1)
            first = Turn(int(turns.max()))
            if first is turn:
                return bool((notes == notes[0]).all())
            if first is Turn.BACKWARD:
                raise RuntimeError("another rank calls `backward`, and this one does not; all ranks must, as often")
            self.begin(first)
            self.end()

    def begin(self, turn: Turn) -> None:
        """A pass begins that all ranks have agreed on."""
        assert self._pass is None, f"{self._pass.key} is still under way" if self._pass else ""
        self._forwards += turn.makes_graph
        key = PassKey(turn, self._forwards if turn is Turn.BACKWARD else 0)
        order = self._orders.get(key)
        self._pass = _Pass(key, order or (), asks=order is None)

    @property
    def turn(self) -> Turn:
        """The pass under way."""
        return self._pass.key.turn if self._pass else Turn.NOTHING

    def end(self) -> None:
        """The pass is over: do what other ranks may still expect, and let go of everything."""
        current = self._pass
        assert current is not None, "no pass is under way"
        if not current.asks:
            self._finish_order(current)
        self._ask(current, None)
        if current.taken:
            self._learn(current)
        for block in self.blocks:
            block.release()
        if current.key.turn is Turn.BACKWARD:
            self._forwards = 0
        self._pass = None

    def _learn(self, current: _Pass) -> None:
        """All ranks have taken the same."""
        order = (*current.order, *current.taken)
        if len(order) > _LONGEST * len(self.blocks):
            self._orders.pop(current.key, None)
        else:
            self._orders[current.key] = order

    def abandon(self) -> None:
        """Forget the pass that an error has ended, if there is one; ranks that go on fail at their time-out."""
        for block in self.blocks:
            with suppress(CommunicationError):
                block.release()
        self._pass = None
        self._forwards = 0

    # --- blocks ------------------------------------------------------------------------------------------------------

    def need(self, index: int) -> None:
        """Return when block `index` is whole.

        Raises:
            RuntimeError: no pass is under way.
        """
        current = self._pass
        block = self.blocks[index]
        if current is None:
            raise RuntimeError(
                f"the parameters of {block.name} are needed outside of a forward or backward pass of the "
                "whole module; call the module itself, and `backward` of what `parallelize` returned"
            )
        if index in current.ahead:
            while (first := current.ahead.popleft()) != index:
                self.blocks[first].release()
        elif block.sharded:
            if not current.asks:
                self._follow(current, index)
            if current.asks:
                self._ask(current, index)
        block.settle()
        if not current.asks:
            self._prefetch(current)

    def leave(self, index: int) -> None:
        """Block `index` is not needed until the next `need`."""
        current = self._pass
        if not self.blocks[index].sharded and (current is None or index not in current.ahead):
            self.blocks[index].release()

    def _follow(self, current: _Pass, index: int) -> None:
        """Gather what the order has next, up to this block, and let go of what stands between."""
        if index not in current.order[current.next :]:
            self._finish_order(current)
            current.asks = True
            return
        place = current.order.index(index, current.next)
        self._let_go_ahead(current)
        self._pass_over(current, place)
        self.blocks[index].start()
        current.next = place + 1

    def _finish_order(self, current: _Pass) -> None:
        self._let_go_ahead(current)
        self._pass_over(current, len(current.order))

    def _let_go_ahead(self, current: _Pass) -> None:
        while current.ahead:
            self.blocks[current.ahead.popleft()].release()

    def _pass_over(self, current: _Pass, stop: int) -> None:
        """Take part in the gathers up to `stop`, for the ranks that need them."""
        for index in current.order[current.next : stop]:
            self._take_part(index)
        current.next = max(current.next, stop)

    def _take_part(self, index: int) -> None:
        # Who has it whole already takes part again, and gets the same values.
        held = not self.blocks[index].sharded
        self.blocks[index].release()
        self.blocks[index].start()
        self.blocks[index].settle()
        if not held:
            self.blocks[index].release()

    def _prefetch(self, current: _Pass) -> None:
        """Start the next gathers; not of a block that is still in use, whose turn comes when it has been left."""
        while len(current.ahead) < self._depth and current.next < len(current.order):
            index = current.order[current.next]
            if not self.blocks[index].sharded:
                return
            self.blocks[index].start()
            current.ahead.append(index)
            current.next += 1

    def _ask(self, current: _Pass, wanted: int | None) -> None:
        """Gather, with all ranks, what any of them wants next, until it is this rank's turn; None: until all are done.

        The lowest block that anybody wants is next.
        """
        nothing = len(self.blocks)
        while True:
            own = torch.tensor([nothing if wanted is None else wanted], device=self._device)
            everybody = own.new_empty(self._group.size)
            self._group.all_gather(own, everybody, label="order")
            chosen = int(everybody.min())
            if chosen == nothing:
                return
            current.taken.append(chosen)
            if chosen == wanted:
                self.blocks[chosen].start()
                return
            self._take_part(chosen)
