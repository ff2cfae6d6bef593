"""Reduces the gradients of any module's units while its backward pass goes on.

A unit is ready when each of its parameters has its gradient, at the latest at the end of the pass. The ranks may come
to that in different orders, or leave parameters out; but reductions are collective, so they are started in one order:
the one in which units became ready on the first rank in the first pass. A unit whose turn has not come waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from meshwright.comm.group import CommunicationError, Reduction
from meshwright.parallel.flat import Slot
from meshwright.parallel.reductions import Reductions
from meshwright.parallel.unit import Unit


class Reducing:
    """The trained units of one rank."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._expected = [len(unit.slots) for unit in units]
        self._missing = list(self._expected)
        self._order: tuple[int, ...] | None = None
        self._ready: list[int] = []
        self._next = 0
        self._under_way = Reductions()
        self._active = self._reduces = self._learns = self._early = self._repeats = False
        self._seen: set[str] = set()
        self.touched: set[str] = set()
        """Names of the parameters that have got a gradient since this was last emptied."""
        for number, unit in enumerate(units):
            for slot, parameter in unit.parameters():
                parameter.register_post_accumulate_grad_hook(self._hook(number, slot))  # type: ignore[no-untyped-call]

    def _hook(self, number: int, slot: Slot) -> Callable[[nn.Parameter], None]:
        def arrived(parameter: nn.Parameter) -> None:
            if not self._active:
                parameter.grad = None
                raise RuntimeError(
                    f"the gradient of {slot.name} was computed outside of `backward`; call `backward(loss)` of what "
                    "`parallelize` returned instead of `loss.backward()`"
                )
            self.touched.add(slot.name)
            if slot.name in self._seen:
                self._again(number, slot)
                return
            self._seen.add(slot.name)
            self._missing[number] -= 1
            if self._missing[number] == 0:
                self._arrived(number)

        return arrived

    @property
    def names(self) -> Mapping[Tensor, str]:
        """The name of every trained parameter."""
        return {parameter: slot.name for unit in self._units for slot, parameter in unit.parameters()}

    def begin(self, last: bool, alike: bool = True) -> None:
        """A backward pass begins; `last` of the step or not.

        Where the whole gradient persists it is reduced with the last pass only, elsewhere with each. If the ranks will
        not come to the same parameters in the same order (they are not `alike`), reductions wait for the end of the
        pass: a rank that waited for one in the middle could keep another from the gather without which that cannot go
        on.
        """
        self._early = alike and self._order is not None and not self._repeats
        self._missing = list(self._expected)
        self._seen.clear()
        self._ready, self._next = [], 0
        self._reduces = last or (bool(self._units) and self._units[0].setting.sharding.gradients)
        self._active = self._learns = True

    def _again(self, number: int, slot: Slot) -> None:
        """A parameter has got a further gradient in one pass: passes within a pass do so (checkpoints that reenter)."""
        self._repeats |= self._order is None
        if self._early and self._order is not None and number in self._order[: self._next]:
            raise RuntimeError(
                f"{slot.name} got a second gradient in one backward pass after its first was summed over the ranks, "
                "and in the first pass no parameter did; use checkpoints with use_reentrant=False"
            )

    def _arrived(self, number: int) -> None:
        self._ready.append(number)
        self._absorb(number)
        if self._reduces and self._early and self._order is not None:
            while self._next < len(self._order) and self._order[self._next] in self._ready:
                self._start(self._order[self._next])
                self._next += 1

    def _absorb(self, number: int) -> None:
        # Where the whole gradient does not persist, room for it is made when its turn has come, in the same order on
        # all ranks.
        if not self._units[number].setting.sharding.gradients:
            self._units[number].absorb_gradient()

    def _start(self, number: int) -> None:
        unit = self._units[number]
        if unit.setting.sharding.gradients:
            unit.absorb_gradient()
        self._under_way.start(unit)

    def end(self) -> None:
        """The pass is over: everything that is to be reduced is, also what this rank has no gradient for."""
        self._active = False
        for number in range(len(self._units)):
            self._absorb(number)
        if not self._reduces:
            return
        order = self._order or tuple(reversed(range(len(self._units))))
        for number in order[self._next :]:
            self._start(number)
        self._under_way.finish()
        if self._order is None and self._learns:
            self._order = self._learn()

    def reduce_rest(self) -> None:
        """Reduce what persists whole, after passes none of which was said to be the last."""
        self.begin(last=True)
        self._learns = False  # nothing becomes ready here
        self.end()

    def abandon(self) -> None:
        """Forget all gradients since the last update: an error has ended a pass."""
        self._active = False
        self._under_way.forget()
        self.touched.clear()
        for unit in self._units:
            for _, parameter in unit.parameters():
                parameter.grad = None
            with suppress(CommunicationError):
                unit.gradient.discard()

    def _learn(self) -> tuple[int, ...]:
        """The order of the first rank, known to all, and whether any rank saw gradients come twice."""
        rest = [number for number in reversed(range(len(self._units))) if number not in self._ready]
        setting = self._units[0].setting
        order = torch.tensor([*self._ready, *rest], device=setting.device)
        setting.shards.broadcast(order, 0, label="order")
        repeats = torch.tensor(int(self._repeats), device=setting.device)
        setting.shards.all_reduce(repeats, label="order", reduction=Reduction.MAX)
        self._repeats = bool(repeats)
        return tuple(order.tolist())
