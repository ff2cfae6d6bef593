"""The description of a model, from which both its cost sheet and its modules are made.

Frozen numbers; no modules, no weights, and no word about how it is divided (that is the layout's).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.layout.nearest import nearest_divisors, one_of


@dataclass(frozen=True)
class GPTSpec:
    """A GPT-2: L layers (blocks) of width h with a heads, for sequences of s tokens out of V (Radford et al., 2019).

    `tied`: the head's projection is the token embedding. `bias`: linear layers and norms have biases. `dropout` is a
    probability. Raises ValueError for sizes below 1, heads that do not divide the width, or a probability outside [0,
    1).
    """

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    sequence: int = 128
    vocabulary: int = 256
    tied: bool = True
    bias: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a size; the nearest that works is {name}=1")
        if self.hidden % self.heads:
            choice = one_of(nearest_divisors(self.hidden, self.heads))
            raise ValueError(f"heads={self.heads} does not divide hidden={self.hidden}; try heads={choice}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} is not a probability below 1; 0 switches it off, 0.1 is usual")

    @property
    def head_size(self) -> int:
        """Width of one attention head: h / a."""
        return self.hidden // self.heads
