"""Finds the tensors with a gradient in whatever a module takes or returns, and where in the graph they come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

_PLAIN = (str, bytes, int, float, type, type(None), FunctionType, MethodType, ModuleType, nn.Module, torch.dtype)


def with_gradient(value: Any) -> tuple[Tensor, ...]:
    """The tensors that require a gradient: alone, in containers that nest, or attributes of objects (dataclasses)."""
    return tuple(tensor for tensor in _tensors(value, set()) if tensor.requires_grad)


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _PLAIN) or id(value) in seen:
        return
    else:
        seen.add(id(value))
        for part in _parts(value):
            yield from _tensors(part, seen)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    leaves = pytree.tree_leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return leaves
    slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    return [*slots, *getattr(value, "__dict__", {}).values()]


def sources(tensors: Iterable[Tensor]) -> dict[Node, Tensor]:
    """The nodes of the graph that the gradients of `tensors` go to next, each with one of the tensors."""
    return {_source(tensor): tensor for tensor in tensors}


def _source(tensor: Tensor) -> Node:
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    with torch.enable_grad():
        of_view = tensor.view_as(tensor).grad_fn
    assert of_view is not None
    node = of_view.next_functions[0][0]
    assert node is not None
    return node
