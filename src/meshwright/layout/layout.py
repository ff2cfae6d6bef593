"""The layout: one frozen value that says how a training run is divided, and its text form.

    dp2.tp2.pp4/zero1/1f1b/m8                     two copies of a pipeline of four stages, each on two tensor ranks
    dp2.tp2.pp4/zero1/1f1b/m8/recompute-full      the same, activations recomputed in the backward pass

The text is the run's name, a row's heading, a field of a checkpoint and a test's id, and
`Layout.parse(str(layout)) == layout`.
Whether a layout is *legal* for a model and a machine is asked of `planner.rules`, not here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from meshwright.layout.mesh import Mesh
from meshwright.layout.nearest import nearest_word, one_of
from meshwright.layout.zero import ZeroStage

E = TypeVar("E", bound=StrEnum)

EXAMPLE = "dp2.tp2.pp4/zero1/1f1b/m8"


class Recompute(StrEnum):
    """Which activations are dropped after the forward pass and computed again in the backward pass."""

    NONE = "none"
    FULL = "full"


class Checkpoints(StrEnum):
    """Where the layers' inputs that recompute starts from are kept (ZeRO-R; Rajbhandari et al., 2020, section 6.1)."""

    WHOLE = "whole"
    SPLIT = "pa"
    HOST = "pa-cpu"


class ScheduleName(StrEnum):
    """The pipeline schedules that a layout can ask for; `schedule.catalog` builds them."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"


@dataclass(frozen=True)
class Layout:
    """Axis sizes, ZeRO stage, schedule, micro-batches per step and pipeline (m), recompute mode, checkpoints.

    Plain ints and strings are accepted for the enums (`Layout(zero=2, schedule="gpipe")`). Raises ValueError for a size
    below 1 or an unknown stage, schedule or mode.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: ZeroStage = ZeroStage.NONE
    schedule: ScheduleName = ScheduleName.ONE_F_ONE_B
    micro_batches: int = 1
    recompute: Recompute = Recompute.NONE
    checkpoints: Checkpoints = Checkpoints.WHOLE

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a size; the nearest that works is {name}=1")
        if self.zero not in set(ZeroStage):
            raise ValueError(f"there is no ZeRO stage {self.zero}; take {one_of(map(int, ZeroStage))}")
        # The frozen value holds enums whatever it was built from, so that `match` and equality see one type.
        object.__setattr__(self, "zero", ZeroStage(self.zero))
        object.__setattr__(self, "schedule", _member(ScheduleName, self.schedule))
        object.__setattr__(self, "recompute", _member(Recompute, self.recompute))
        object.__setattr__(self, "checkpoints", _member(Checkpoints, self.checkpoints))

    @property
    def mesh(self) -> Mesh:
        """The mesh of the three axes."""
        return Mesh(data=self.data, pipeline=self.pipeline, tensor=self.tensor)

    @property
    def ranks(self) -> int:
        """Number of ranks: d * t * p."""
        return self.mesh.size

    def __str__(self) -> str:
        axes = f"dp{self.data}.tp{self.tensor}.pp{self.pipeline}"
        parts = [axes, f"zero{int(self.zero)}", str(self.schedule), f"m{self.micro_batches}"]
        if self.recompute is not Recompute.NONE:
            parts.append(f"recompute-{self.recompute}")
        if self.checkpoints is not Checkpoints.WHOLE:
            parts.append(str(self.checkpoints))
        return "/".join(parts)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read the text form; parts may stand in any order, and a part left out has its default.

        Raises ValueError for an unknown or repeated part, naming it and the nearest spelling that works.
        """
        values: dict[str, int | str] = {}
        spelled: dict[str, str] = {}
        for part in re.split(r"[/.]", text.strip()):
            if not part:
                raise ValueError(f'layout "{text}" has an empty part; a layout reads like {EXAMPLE}')
            field, value = _read(part, text)
            if field in values:
                raise ValueError(
                    f'layout "{text}": "{part}" says {field} again after "{spelled[field]}"; keep one of them'
                )
            values[field], spelled[field] = value, part
        return replace(cls(), **values)  # type: ignore[arg-type]  # __post_init__ turns ints and strings into enums


_NUMBERED = {"dp": "data", "tp": "tensor", "pp": "pipeline", "zero": "zero", "m": "micro_batches"}
"""Prefix of a part that ends in a number -> the field it sets."""

_WORDS: dict[str, tuple[str, str]] = {
    **{str(name): ("schedule", str(name)) for name in ScheduleName},
    **{f"recompute-{mode}": ("recompute", str(mode)) for mode in Recompute},
    **{str(place): ("checkpoints", str(place)) for place in Checkpoints if place is not Checkpoints.WHOLE},
}
"""A part that is a word -> the field it sets and its value."""


def _read(part: str, text: str) -> tuple[str, int | str]:
    """The field and value of one part. Raises ValueError with the nearest spelling."""
    if part in _WORDS:
        return _WORDS[part]
    numbered = re.fullmatch(r"([a-z]+)([0-9]+)", part)
    if numbered and numbered[1] in _NUMBERED:
        number = int(numbered[2])
        stages = range(len(ZeroStage))
        legal = number in stages if numbered[1] == "zero" else number >= 1
        if legal:
            return _NUMBERED[numbered[1]], number
        nearest = f"{numbered[1]}{stages[-1] if numbered[1] == 'zero' else 1}"
    else:
        trailing = re.search(r"[0-9]+$", part)
        number = int(trailing[0]) if trailing else 1
        stage = min(number, ZeroStage.PARAMETERS)
        numbers = [f"{prefix}{stage if prefix == 'zero' else max(number, 1)}" for prefix in _NUMBERED]
        nearest = nearest_word(part, [*numbers, *_WORDS])
    raise ValueError(
        f'layout "{text}": "{part}" is not a part of a layout; the nearest is "{nearest}" (example: {EXAMPLE})'
    )


def _member(kind: type[E], value: str) -> E:
    """`value` as a member of an enum. Raises ValueError with the nearest member."""
    try:
        return kind(value)
    except ValueError:
        nearest = nearest_word(value, [str(member) for member in kind])
        raise ValueError(f'"{value}" is not a {kind.__name__}; the nearest is "{nearest}"') from None
