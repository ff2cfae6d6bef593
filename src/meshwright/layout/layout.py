"""The layout: one frozen value that says how a training run is divided, and its text form.

    dp2.tp2.pp4/zero1/1f1b/m8                     two copies of a pipeline of four stages, each on two tensor ranks
    dp2.tp2.pp4/zero1/1f1b/m8/recompute-full      the same, activations recomputed in the backward pass
    dp8.tp1.pp1/zero3/shard4/offload/1f1b/m1      states divided over 4 ranks, two such copies; optimizer on the host

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
from meshwright.layout.nearest import nearest_divisors, nearest_word, one_of
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

    `shard`: over how many consecutive data ranks (those of one node) model states are divided, while the runs of them
    are replicas of each other (HSDP; MiCS, Zhang et al., 2022); 0 stands for all data ranks. `prefetch`: how many
    layers ahead stage 3 gathers. `offload`: optimizer states and step on the host (ZeRO-Offload, Ren et al., 2021).

    Plain ints and strings are accepted for the enums (`Layout(zero=2, schedule="gpipe")`). Raises ValueError for a size
    below 1, a shard that does not divide data, a negative prefetch, or an unknown stage, schedule or mode.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: ZeroStage = ZeroStage.NONE
    schedule: ScheduleName = ScheduleName.ONE_F_ONE_B
    micro_batches: int = 1
    recompute: Recompute = Recompute.NONE
    checkpoints: Checkpoints = Checkpoints.WHOLE
    shard: int = 0
    prefetch: int = 1
    offload: bool = False

    def __post_init__(self) -> None:
        least = {"data": 1, "tensor": 1, "pipeline": 1, "micro_batches": 1, "shard": 0, "prefetch": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name}={getattr(self, name)} is not a size; the nearest that works is {name}={low}")
        if self.shard and self.data % self.shard:
            choice = one_of(nearest_divisors(self.data, self.shard))
            raise ValueError(f"shard={self.shard} does not divide dp={self.data}; try shard={choice}")
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

    @property
    def effective_zero(self) -> ZeroStage:
        """The ZeRO stage that changes anything: over one rank nothing is divided, whatever the layout asks for."""
        return self.zero if (self.shard or self.data) > 1 else ZeroStage.NONE

    @property
    def shards(self) -> int:
        """Number of data ranks that divide model states among them: the divisor of the ZeRO table.

        All data ranks where nothing is divided, so that stage 0 has no replicas.
        """
        return (self.shard or self.data) if self.effective_zero else self.data

    @property
    def replicas(self) -> int:
        """Number of runs of `shards` data ranks, each of which holds all model states."""
        return self.data // self.shards

    def __str__(self) -> str:
        parts = [f"dp{self.data}.tp{self.tensor}.pp{self.pipeline}", f"zero{int(self.zero)}"]
        if self.shard:
            parts.append(f"shard{self.shard}")
        if self.prefetch != 1:
            parts.append(f"prefetch{self.prefetch}")
        if self.offload:
            parts.append("offload")
        parts += [str(self.schedule), f"m{self.micro_batches}"]
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
        values: dict[str, int | str] = {}  # bool is an int
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


_NUMBERED: dict[str, tuple[str, int]] = {
    "dp": ("data", 1),
    "tp": ("tensor", 1),
    "pp": ("pipeline", 1),
    "zero": ("zero", 0),
    "m": ("micro_batches", 1),
    "shard": ("shard", 1),
    "prefetch": ("prefetch", 0),
}
"""Prefix of a part that ends in a number -> the field it sets, and the least number."""

_WORDS: dict[str, tuple[str, int | str]] = {
    **{str(name): ("schedule", str(name)) for name in ScheduleName},
    **{f"recompute-{mode}": ("recompute", str(mode)) for mode in Recompute},
    **{str(place): ("checkpoints", str(place)) for place in Checkpoints if place is not Checkpoints.WHOLE},
    "offload": ("offload", True),
}
"""A part that is a word -> the field it sets and its value."""


def _read(part: str, text: str) -> tuple[str, int | str]:
    """The field and value of one part. Raises ValueError with the nearest spelling."""
    if part in _WORDS:
        return _WORDS[part]
    numbered = re.fullmatch(r"([a-z]+)([0-9]+)", part)
    if numbered and numbered[1] in _NUMBERED:
        field, _ = _NUMBERED[numbered[1]]
        number = _nearest_number(numbered[1], int(numbered[2]))
        if number == int(numbered[2]):
            return field, number
        nearest = f"{numbered[1]}{number}"
    else:
        trailing = re.search(r"[0-9]+$", part)
        number = int(trailing[0]) if trailing else 1
        numbers = [f"{prefix}{_nearest_number(prefix, number)}" for prefix in _NUMBERED]
        nearest = nearest_word(part, [*numbers, *_WORDS])
    raise ValueError(
        f'layout "{text}": "{part}" is not a part of a layout; the nearest is "{nearest}" (example: {EXAMPLE})'
    )


def _nearest_number(prefix: str, number: int) -> int:
    """The number nearest to `number` that may stand behind a prefix."""
    at_least = max(number, _NUMBERED[prefix][1])
    return min(at_least, max(ZeroStage)) if prefix == "zero" else at_least


def _member(kind: type[E], value: str) -> E:
    """`value` as a member of an enum. Raises ValueError with the nearest member."""
    try:
        return kind(value)
    except ValueError:
        nearest = nearest_word(value, [str(member) for member in kind])
        raise ValueError(f'"{value}" is not a {kind.__name__}; the nearest is "{nearest}"') from None
