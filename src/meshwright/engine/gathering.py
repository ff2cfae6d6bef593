"""Makes the blocks of any module whole while they are used, under ZeRO stage 3 without shared memory.

      forward    need(block) ─ call ─ leave(block)      need(next) ...
      backward   need(block) when the gradient of its output is there ─ ... ─ leave(block) when that of its input is

All ranks gather the same blocks in the same order, whatever their modules do: the order of a pass is learned the first
time and followed afterwards. The first time, the ranks ask each other before every gather what they need next. Later, a
rank that leaves a block out gathers it all the same and lets go of it. While a block is used, the next `depth` of the
order are on their way; so at most depth + 1 are whole, besides those that enclose others or are shared (ZeRO, section
7.2.2, "spread across the entire forward propagation").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from meshwright.comm.group import Group
from meshwright.parallel.unit import State, Unit

Order = tuple[int, ...]
PassKey = tuple[str, ...]
"""What tells passes apart that may use blocks in different orders."""


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
    order: Order | None
    next: int = 0
    """The place in the order from which nothing has been gathered."""
    ahead: deque[int] = field(default_factory=deque)
    """Gathered before anybody needed them, in order."""
    taken: list[int] = field(default_factory=list)


class Gathering:
    """The blocks of one rank, which all ranks of `group` hold shards of."""

    def __init__(self, blocks: Sequence[GatheredBlock], group: Group, depth: int, device: torch.device) -> None:
        self._blocks = blocks
        self._group = group
        self._depth = depth
        self._device = device
        self._orders: dict[PassKey, Order] = {}
        self._pass: _Pass | None = None

    def begin(self, key: PassKey) -> None:
        """A pass begins."""
        assert self._pass is None, f"a {self._pass.key[0]} pass is still under way" if self._pass else ""
        self._pass = _Pass(key, self._orders.get(key))

    @property
    def under_way(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._pass is not None

    def need(self, index: int) -> None:
        """Return when block `index` is whole.

        Raises:
            RuntimeError: it is not where the order that was learned has it.
        """
        current = self._pass
        if current is None:
            raise RuntimeError(
                f"the parameters of {self._blocks[index].name} are needed outside of a forward or backward pass of the "
                "whole module; call the module itself, and `backward` of what `parallelize` returned"
            )
        if current.order is None:
            if self._blocks[index].sharded:
                self._ask(current, index)
        elif not self._from_ahead(current, index) and self._blocks[index].sharded:
            self._follow(current, current.order, index)
        self._blocks[index].settle()
        if current.order is not None:
            self._prefetch(current, current.order)

    def leave(self, index: int) -> None:
        """Block `index` is not needed until the next `need`."""
        if not self._blocks[index].sharded:
            self._blocks[index].release()

    def end(self) -> None:
        """The pass is over: do what other ranks may still expect, and let go of everything."""
        current = self._pass
        assert current is not None, "no pass is under way"
        if current.order is None:
            self._ask(current, None)
            if current.taken:  # else no rank had anything to compute
                self._orders[current.key] = tuple(current.taken)
        else:
            while current.ahead:
                self._blocks[current.ahead.popleft()].release()
            self._pass_over(current, current.order, len(current.order))
        for block in self._blocks:
            block.release()
        self._pass = None

    def abandon(self) -> None:
        """Forget a pass that an error has ended; the other ranks fail at their time-out."""
        self._pass = None

    # --- the first time --------------------------------------------------------------------------------------------

    def _ask(self, current: _Pass, wanted: int | None) -> None:
        """Gather, with all ranks, what any of them wants next, until it is this rank's turn; None: until all are done.

        The lowest block that anybody wants is next.
        """
        nothing = len(self._blocks)
        while True:
            own = torch.tensor([nothing if wanted is None else wanted], device=self._device)
            everybody = own.new_empty(self._group.size)
            self._group.all_gather(own, everybody, label="order")
            chosen = int(everybody.min())
            if chosen == nothing:
                return
            current.taken.append(chosen)
            # Who has it whole already takes part again, and gets the same values.
            held = not self._blocks[chosen].sharded
            self._blocks[chosen].release()
            self._blocks[chosen].start()
            if chosen == wanted:
                return
            self._blocks[chosen].settle()
            if not held:
                self._blocks[chosen].release()

    # --- afterwards ------------------------------------------------------------------------------------------------

    def _from_ahead(self, current: _Pass, index: int) -> bool:
        """Whether it was gathered ahead; those before it are passed over."""
        if index not in current.ahead:
            return False
        while (first := current.ahead.popleft()) != index:
            self._blocks[first].release()
        return True

    def _follow(self, current: _Pass, order: Order, index: int) -> None:
        """Gather what the order has next, up to this block, and let go of what stands between."""
        try:
            place = order.index(index, current.next)
        except ValueError:
            raise RuntimeError(
                f"{self._blocks[index].name} is used where the first {current.key[0]} pass did not use it, and without "
                "shared memory stage 3 must gather in one order on all ranks; take stage 2, or make the ranks of one "
                "host share memory"
            ) from None
        while current.ahead:
            self._blocks[current.ahead.popleft()].release()
        self._pass_over(current, order, place)
        self._blocks[index].start()
        current.next = place + 1

    def _pass_over(self, current: _Pass, order: Order, stop: int) -> None:
        """Take part in the gathers up to `stop`, for the ranks that need them."""
        for index in order[current.next : stop]:
            held = not self._blocks[index].sharded
            self._blocks[index].release()
            self._blocks[index].start()
            self._blocks[index].settle()
            if not held:
                self._blocks[index].release()
        current.next = max(current.next, stop)

    def _prefetch(self, current: _Pass, order: Order) -> None:
        """Start the next gathers; not of a block that is still in use, whose turn comes when it has been left."""
        while len(current.ahead) < self._depth and current.next < len(order):
            index = order[current.next]
            if not self._blocks[index].sharded:
                return
            self._blocks[index].start()
            current.ahead.append(index)
            current.next += 1
