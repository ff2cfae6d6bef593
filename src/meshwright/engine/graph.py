"""Which leaves a backward pass will reach, known before it runs, and whether the ranks of a group agree on it."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import torch
from torch import Tensor

from meshwright.comm.group import Group, Reduction


def reached(loss: Tensor | None, names: Mapping[Tensor, str]) -> frozenset[str]:
    """The names of those of the given leaves that `loss` depends on; tensors are told apart by identity."""
    found: set[str] = set()
    seen = set()
    waiting = [loss.grad_fn] if loss is not None and loss.grad_fn is not None else []
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf in names:
            found.add(names[leaf])
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return frozenset(found)


def agreed(names: frozenset[str], group: Group, device: torch.device) -> bool:
    """Whether all ranks of `group` have the same names; all must call it."""
    digest = blake2b("\n".join(sorted(names)).encode(), digest_size=4).digest()
    own = int.from_bytes(digest, "little")
    extremes = torch.tensor([own, -own], dtype=torch.int64, device=device)
    group.all_reduce(extremes, label="agreement", reduction=Reduction.MAX)
    return int(extremes[0]) == -int(extremes[1])
