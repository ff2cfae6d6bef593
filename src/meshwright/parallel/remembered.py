"""What any torch optimizer remembers of a parameter between steps, found out by trying; its own keys are kept.

Nothing here knows about shards: `parallel.zero` cuts and joins what is remembered for each element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.elementwise import OptimizerFactory


@dataclass(frozen=True)
class Remembered:
    """What an optimizer remembers of a parameter, by key: a number for `each` element, and numbers `once` for all.

    The values are examples that show dtype and device.
    """

    each: Mapping[str, Tensor]
    once: Mapping[str, Any]

    @classmethod
    def by(cls, factory: OptimizerFactory, groups: Sequence[Mapping[str, Any]], like: Tensor) -> Remembered:
        """What one made by `factory` does in any of the groups, found out by stepping small tensors like `like`."""
        each, once = {}, {}
        for group in groups:
            value = like.new_ones(3)
            value.grad = like.new_ones(3)
            optimizer = factory([{"params": [value], **group}])
            optimizer.step()
            for key, known in optimizer.state[value].items():
                if isinstance(known, Tensor) and known.shape == value.shape:
                    each[key] = known
                elif known is not None:
                    once[key] = known
        return cls(each, once)

    def require(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Refuse, with ValueError, what another optimizer remembered."""
        own = {*self.each, *self.once}
        for name, known in states.items():
            if not own.issuperset(known):
                raise ValueError(
                    f"{name} comes with {', '.join(sorted(known))}, but this optimizer remembers "
                    f"{', '.join(sorted(own)) or 'nothing'}; take the optimizer that it was trained with"
                )

    def as_once(self, key: str, value: Tensor) -> Any:
        """A number in the form in which the optimizer keeps it."""
        like = self.once[key]
        if isinstance(like, Tensor):
            return torch.full_like(like, float(value))
        return type(like)(value.item())
