"""In which order a backward pass will come to which leaves, known before it runs; and a number to compare it by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from torch import Tensor
from torch.autograd.graph import Node

_REENTERS = "CheckpointFunctionBackward"
"""The node of a checkpoint that runs a backward pass of its own, of which nothing is known before."""


def order_of_leaves(loss: Tensor | None, names: Mapping[Tensor, str]) -> Sequence[str] | None:
    """The names of the given leaves in the order in which what uses them was computed last, as often as they are used.

    None where it cannot be told. Tensors are told apart by identity.
    """
    uses: list[tuple[int, str]] = []
    seen: set[Node] = set()
    waiting = [loss.grad_fn] if loss is not None and loss.grad_fn is not None else []
    while waiting:
        node = waiting.pop()
        if node.name() == _REENTERS:
            return None
        for following, _ in node.next_functions:
            leaf = getattr(following, "variable", None)
            if leaf is not None and leaf in names:
                uses.append((node._sequence_nr(), names[leaf]))
            elif following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return [name for _, name in sorted(uses, reverse=True)]


def digest(names: Sequence[str]) -> int:
    """A number that equal sequences of names have in common, and others hardly ever."""
    return int.from_bytes(blake2b("\n".join(names).encode(), digest_size=7).digest(), "little")
