"""Watches the calls of a module's blocks and the gradients that pass them, and tells `Gathering`.

      x ──► block ──► y            before the call       take
     dx ◄── block ◄── dy           after the call        give back
                                   dy is there           take
                                   dx is there           give back

A block is needed until everybody who has taken it has given it back: calls nest, one module may be called twice in a
row, and in a backward pass it may be called again to recompute. What is given back when `dx` is there is so before the
block below is taken, whose `dy` it is: hooks of tensors run before those of nodes. A block of which no input has a
gradient is given back when the pass ends.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from meshwright.engine.gathering import Gathering, Turn
from meshwright.engine.tensors import sources, with_gradient
from meshwright.parallel.blocks import Block


class _Hold:
    """Blocks, taken or given back; either may be said again."""

    def __init__(self, hooks: Hooks, indices: Sequence[int]) -> None:
        self._hooks = hooks
        self._indices = indices
        self._taken: list[int] = []

    def take(self) -> None:
        if not self._taken:
            for index in self._indices:
                self._hooks.holds[index] += 1
                self._taken.append(index)
                self._hooks.gathering.need(index)

    def give_back(self) -> None:
        while self._taken:
            index = self._taken.pop()
            self._hooks.holds[index] -= 1
            if self._hooks.holds[index] == 0:
                self._hooks.gathering.leave(index)


class _Call:
    """One call of a module: what it holds while it runs forward, and again while it runs backward."""

    def __init__(self, hooks: Hooks, module: nn.Module, indices: Sequence[int]) -> None:
        self.module = module
        self.forward = _Hold(hooks, indices)
        self.is_pass = False
        """Whether it is a forward pass of the whole module."""
        self._hooks = hooks
        self._indices = indices
        self._backward = _Hold(hooks, indices)
        self._inputs: list[Node] = []
        self._task = -1
        self._awaited = 0

    def watch_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Give back when the gradients of all these are there that this backward pass computes."""
        for node, tensor in sources(inputs).items():
            self._inputs.append(node)
            handle = tensor.register_hook(lambda _: self._input_is_there())  # type: ignore[no-untyped-call]
            if tensor.is_leaf:  # which outlives the graph
                self._hooks.handles.append(handle)

    def watch_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Take as soon as the gradient of one of these is there."""
        # The inputs' nodes must be known from above only: a node that knew itself would never be freed.
        inputs, self._inputs = self._inputs, []

        def output_is_there(_: Sequence[Tensor]) -> None:
            task = torch._C._current_graph_task_id()
            if task != self._task:
                _require_single_backward()
                self._task = task
                self._awaited = sum(map(_will_run, inputs))
                self._backward = _Hold(self._hooks, self._indices)
                self._backward.take()

        for node, tensor in sources(outputs).items():
            if not tensor.is_leaf and node not in inputs:
                node.register_prehook(output_is_there)

    def _input_is_there(self) -> None:
        if torch._C._current_graph_task_id() == self._task:
            self._awaited -= 1
            if self._awaited == 0:
                self._backward.give_back()


def _will_run(node: Node) -> bool:
    """Whether the backward pass under way computes the gradient that goes to `node`."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # it is a leaf that autograd.grad was asked for
        return True


def _require_single_backward() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a gradient of gradients (create_graph=True) needs the parameters again after they have been divided; "
            "without shared memory, take stage 2 for it"
        )


class Hooks:
    """Hooks at every module of every block; `root` is the whole module, whose call is a forward pass."""

    def __init__(self, root: nn.Module, blocks: Sequence[Block], gathering: Gathering) -> None:
        self.gathering = gathering
        self.holds: Counter[int] = Counter()
        self.handles: list[RemovableHandle] = []
        self._root = root
        self._calls: list[_Call] = []
        users: dict[nn.Module, list[int]] = {root: []}
        for index, block in enumerate(blocks):
            for module in block.modules:
                users.setdefault(module, []).append(index)
        for module, indices in users.items():
            module.register_forward_pre_hook(self._before(tuple(indices)), prepend=True, with_kwargs=True)
            # Also after an error, such as the one by which a checkpoint ends its recomputation early.
            module.register_forward_hook(self._after(tuple(indices)), with_kwargs=True, always_call=True)

    # --- passes ------------------------------------------------------------------------------------------------------

    def finish_forwards(self) -> None:
        """Return when no rank goes forward any more."""
        self.gathering.meet(Turn.NOTHING)

    def begin_backward(self, note: int) -> bool:
        """A backward pass begins; whether all ranks have the same `note` about it."""
        alike = self.gathering.meet(Turn.BACKWARD, note)
        self._forget()
        self.gathering.begin(Turn.BACKWARD)
        return alike

    def end_backward(self) -> None:
        """The backward pass is over."""
        self.gathering.end()
        self._forget()
        while self.handles:
            self.handles.pop().remove()

    def abandon(self) -> None:
        """Forget passes that an error has ended."""
        self.gathering.abandon()
        self._forget()

    def _forget(self) -> None:
        self._calls.clear()
        self.holds.clear()

    # --- calls -------------------------------------------------------------------------------------------------------

    def _before(self, indices: tuple[int, ...]) -> Callable[..., None]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            call = _Call(self, module, indices)
            self._calls.append(call)
            if module is self._root and self.gathering.turn is Turn.NOTHING:
                turn = Turn.forward(module.training, torch.is_grad_enabled())
                self.gathering.meet(turn)
                self._forget()
                self._calls.append(call)
                self.gathering.begin(turn)
                call.is_pass = True
            if torch.is_grad_enabled():
                call.watch_inputs(with_gradient((args, kwargs)))
            call.forward.take()

        return before

    def _after(self, indices: tuple[int, ...]) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            call = self._calls.pop()
            assert call.module is module, "calls of modules do not nest"
            failed = output is None and sys.exc_info()[0] is not None
            outputs = with_gradient(output)
            self._refuse_parameters(indices, outputs)
            call.watch_outputs(outputs)
            call.forward.give_back()
            if call.is_pass and failed:
                self.abandon()
            elif call.is_pass:
                self.gathering.end()

        return after

    def _refuse_parameters(self, indices: Sequence[int], outputs: Sequence[Tensor]) -> None:
        """What is released after the call must not leave it."""
        if not outputs:
            return
        own = {unit.storage: block for block in (self.gathering.blocks[i] for i in indices) for unit in block.units}
        for output in outputs:
            place = output.untyped_storage().data_ptr() if output.layout is torch.strided else 0
            if place and place in own:
                name = own[place].name
                raise RuntimeError(
                    f"{name} returns one of its own parameters, or a view of it, whose memory is given back after the "
                    "call; make one block of it and of what uses the parameter (units=...)"
                )
