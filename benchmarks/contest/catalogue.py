"""All systems by name, and which are compared with which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from contest import ours, rivals
from contest.rivals import Train
from contest.work import RANKS, Seat, Work


@dataclass(frozen=True)
class System:
    """A way to train.

    Args:
        title: in the table.
        prepare: sets it up on one process.
        ranks: how many processes it has; the threads are the same number in all.
        module: a package that it needs and that may not be installed.
    """

    title: str
    prepare: Callable[[Seat], Train]
    ranks: int = RANKS
    module: str = ""

    @property
    def threads(self) -> int:
        """Of each process."""
        return RANKS // self.ranks


SYSTEMS = {
    "limit": System("one process", rivals.limit, ranks=1),
    "limit-bf16": System("one process, bf16 weights", rivals.limit_bf16, ranks=1),
    "ddp": System("DDP", rivals.ddp),
    "ddp-zero": System("DDP + ZeroRedundancyOptimizer", rivals.ddp_zero),
    "fsdp2": System("FSDP2", rivals.fsdp2),
    "fsdp2-keep": System("FSDP2, no reshard after forward", rivals.fsdp2_keep),
    **{
        f"deepspeed{stage}": System(f"DeepSpeed {stage}", partial(rivals.deepspeed, stage=stage), module="deepspeed")
        for stage in (1, 2, 3)
    },
    **{f"ours{stage}": System(f"meshwright ZeRO-{stage}", partial(ours.ours, stage=stage)) for stage in range(4)},
    **{
        f"any{stage}": System(f"meshwright ZeRO-{stage}, their module", partial(ours.any_module, stage=stage))
        for stage in range(4)
    },
}

LIMITS = ("limit", "limit-bf16")
"""One process with all threads, in as many ways as there are; the quicker one counts."""

RIVALS = (
    ("ddp",),
    ("ddp-zero", "fsdp2-keep", "deepspeed1"),
    ("ddp-zero", "fsdp2-keep", "deepspeed2"),
    ("fsdp2", "deepspeed3"),
)
"""Whom each of our stages is measured against."""


@dataclass(frozen=True)
class Match:
    """Systems that take turns: limits, rivals of one of our stages, ours."""

    work: Work
    stage: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.work.size} {self.work.dtype}, stage {self.stage}"

    @property
    def limits(self) -> tuple[str, ...]:
        """Those of them that are the limit."""
        return tuple(name for name in self.names if name in LIMITS)

    @property
    def rivals(self) -> tuple[str, ...]:
        """Those of them that ours is compared with."""
        return tuple(name for name in self.names if name in RIVALS[self.stage])

    @property
    def ours(self) -> tuple[str, ...]:
        """Those of them that are ours."""
        return tuple(name for name in self.names if name in (f"any{self.stage}", f"ours{self.stage}"))


def matches(work: Work, chosen: tuple[str, ...]) -> tuple[Match, ...]:
    """A match for each stage among the `chosen` systems, where there is anyone besides the limit."""
    limits = LIMITS if work.bf16 else LIMITS[:1]
    candidates = (
        (stage, tuple(name for name in (*limits, *rivals, f"any{stage}", f"ours{stage}") if name in chosen))
        for stage, rivals in enumerate(RIVALS)
    )
    return tuple(Match(work, stage, names) for stage, names in candidates if set(names) - set(LIMITS))
