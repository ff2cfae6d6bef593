"""Watches the calls of a module's blocks and the gradients that pass them, and tells `Gathering`.

      x ──► block ──► y            before the call       need
     dx ◄── block ◄── dy           after the call        leave, unless its backward pass has begun (recomputation)
                                   dy is there           need
                                   dx is there           leave

Tensors are found in whatever a module takes and returns (tuples, lists, dicts, and what is registered with torch's
pytree). A block of which no input has a gradient is left when the pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils import _pytree as pytree

from meshwright.engine.gathering import Gathering
from meshwright.parallel.blocks import Block


class Hooks:
    """Hooks at every module of every block; `root` is the whole module, whose call is a forward pass."""

    def __init__(self, root: nn.Module, blocks: Sequence[Block], gathering: Gathering) -> None:
        self._root = root
        self._gathering = gathering
        self._backward: set[int] = set()
        self.forwards = 0
        """Forward passes with a graph since the last backward pass."""
        users: dict[nn.Module, list[int]] = {root: []}
        for index, block in enumerate(blocks):
            for module in block.modules:
                users.setdefault(module, []).append(index)
        for module, indices in users.items():
            module.register_forward_pre_hook(self._before(tuple(indices)), prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after(tuple(indices)), with_kwargs=True, always_call=False)

    def join_forward(self, graph: bool) -> None:
        """Take part in the forward pass that other ranks make."""
        self._begin_forward(self._root.training, graph)
        self._gathering.end()

    def _begin_forward(self, training: bool, graph: bool) -> None:
        self.forwards += graph
        self._gathering.begin(("forward", f"training={training}", f"graph={graph}"))

    def begin_backward(self) -> None:
        """A backward pass begins."""
        self._gathering.begin(("backward", str(self.forwards)))

    def end_backward(self) -> None:
        """The backward pass is over."""
        self._gathering.end()
        self._backward.clear()
        self.forwards = 0

    def abandon(self) -> None:
        """Forget passes that an error has ended."""
        self._gathering.abandon()
        self._backward.clear()
        self.forwards = 0

    def _before(self, indices: tuple[int, ...]) -> Callable[..., None]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module is self._root and not self._gathering.under_way:
                self._begin_forward(module.training, torch.is_grad_enabled())
            for index in indices:
                self._gathering.need(index)
            inputs = _with_gradient((args, kwargs))
            if inputs and torch.is_grad_enabled():
                register_multi_grad_hook(inputs, lambda _: self._leave(indices))

        return before

    def _after(self, indices: tuple[int, ...]) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            outputs = _with_gradient(output)
            if outputs:
                register_multi_grad_hook(outputs, lambda _: self._enter(indices), mode="any")
            for index in indices:
                # What is computed again within a backward pass is about to be used by it.
                if index not in self._backward:
                    self._gathering.leave(index)
            if module is self._root and not self._backward and self._gathering.under_way:
                self._gathering.end()

        return after

    def _enter(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._backward.add(index)
            self._gathering.need(index)

    def _leave(self, indices: Iterable[int]) -> None:
        for index in indices:
            if index in self._backward:
                self._backward.discard(index)
                self._gathering.leave(index)


def _with_gradient(value: Any) -> tuple[Tensor, ...]:
    leaves = pytree.tree_leaves(value)
    return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad)
