"""An operation of a pipeline, and the one rule of which operation needs which.

    F3@1    the forward pass of micro-batch 3 on stage 1
    B3@1    its backward pass

`needs` is the only place that states the dependencies: the schedule's checks, the messages of a program and the
simulator all ask it. An op has no duration, no rank and no tensors (GPipe, section 2.2; Narayanan et al., 2021,
section 2.2).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never


class Kind(StrEnum):
    """What an op computes."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, order=True)
class Op:
    """One pass of one micro-batch through one stage; all counted from 0."""

    kind: Kind
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}@{self.stage}"

    @classmethod
    def parse(cls, text: str) -> Op:
        """Read the text form. Raises ValueError for anything else."""
        match = re.fullmatch(r"([FB])([0-9]+)@([0-9]+)", text)
        if match is None:
            raise ValueError(f'"{text}" is not an op; an op reads like F3@1 or B3@1 (micro-batch 3 on stage 1)')
        return cls(Kind(match[1]), int(match[2]), int(match[3]))


def needs(op: Op, stages: int) -> tuple[Op, ...]:
    """The ops whose results `op` needs, in a pipeline of `stages` stages.

    A forward needs the activations of the stage before; a backward its own forward and the gradient of the stage after.

        F@0 ──► F@1 ──► F@2
         │       │       │
         ▼       ▼       ▼
        B@0 ◄── B@1 ◄── B@2
    """
    match op.kind:
        case Kind.FORWARD:
            return (Op(Kind.FORWARD, op.micro_batch, op.stage - 1),) if op.stage > 0 else ()
        case Kind.BACKWARD:
            forward = Op(Kind.FORWARD, op.micro_batch, op.stage)
            after = (Op(Kind.BACKWARD, op.micro_batch, op.stage + 1),) if op.stage < stages - 1 else ()
            return (forward, *after)
        case _:
            assert_never(op.kind)
