"""A program to look at: one line per op, with all that is done for it.

    F3@1  RECV F3@0  GATHER 4  F3@1.4  RELEASE 4  SEND F3@1

The complete text form, one action per line, is `str(program)`; this one is for reading and does not read back.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from textwrap import wrap
from typing import assert_never

from meshwright.report.grid import INDENT, excerpt
from meshwright.schedule.op import Kind, Op
from meshwright.schedule.program import (
    Action,
    Backward,
    Forward,
    Gather,
    Program,
    Receive,
    Recompute,
    Reduce,
    Release,
    Send,
    Step,
    Sync,
    Tied,
)

_STEP = "step"


def program_picture(program: Program, width: int, most_ops: int = 24) -> list[str]:
    """The actions of each op on a line (more where it is long); ops in the middle of a long program are left out."""
    groups = [
        (subject, [str(action) for _, action in pairs])
        for subject, pairs in groupby(zip(_subjects(program), program.actions, strict=True), key=lambda pair: pair[0])
    ]
    label = max((len(subject) for subject, _ in groups), default=0) + 2 + len(INDENT)
    shown = excerpt(len(groups), most_ops)
    lines: list[str] = []
    for part in (shown.first, shown.last):
        if part is shown.last and shown.hidden:
            lines.append(f"{INDENT}⋮  {shown.hidden} more ops")
        for index in part:
            subject, actions = groups[index]
            # Actions are wrapped as words: a no-break space keeps "SEND F0@1" together.
            words = "  ".join(action.replace(" ", "\xa0") for action in actions)
            rows = wrap(words, width - label, break_long_words=False, break_on_hyphens=False)
            heads = [f"{INDENT}{subject}", *[""] * (len(rows) - 1)]
            lines += [head.ljust(label) + row.replace("\xa0", " ") for head, row in zip(heads, rows, strict=True)]
    return lines


def _subjects(program: Program) -> Iterator[str]:
    """For each action the op it is done for, or "step"."""
    computed = [_computed(action) for action in program.actions]
    before = ""
    for index, action in enumerate(program.actions):
        before = computed[index] or before
        match action:
            case Forward() | Recompute() | Backward() | Send() | Release() | Reduce() | Sync() | Tied() | Step():
                yield before
            case Receive() | Gather():
                yield next((subject for subject in computed[index:] if subject), _STEP)
            case _:
                assert_never(action)


def _computed(action: Action) -> str | None:
    """What an action itself works on; None for those that serve the action before or after them."""
    match action:
        case Forward(op) | Backward(op):
            return str(op)
        case Recompute(op):
            return str(Op(Kind.BACKWARD, op.micro_batch, op.stage))
        case Tied() | Step():
            return _STEP
        case Receive() | Send() | Gather() | Release() | Reduce() | Sync():
            return None
        case _:
            assert_never(action)
