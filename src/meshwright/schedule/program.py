"""A program: everything one pipeline rank does in a step, as a flat list of actions that prints and reads back.

    program of rank 1
    RECV F0@0 from 0    the activations of micro-batch 0 arrive from stage 0
    GATHER 2            unit 2 becomes whole (ZeRO)
    F0@1.2              forward of micro-batch 0 on stage 1, layer 2
    RELEASE 2           unit 2 goes back to its shard
    SEND F0@1 to 2      the activations leave for the next stage
    R0@1.2              layer 2 once more, for its backward
    B0@1.2              backward
    REDUCE 2            sum the gradient of unit 2 over the data axis, or over this rank's run of it (HSDP)
    SYNC 2              sum what this rank owns of that gradient over the replicas of the run
    TIE tied            sum the gradient of a tied parameter over the stages that hold it
    STEP                optimizer

The engine is a `match` over these verbs and knows nothing about pipelines. Programs are written by `passes`; no action
has a duration or a tensor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from meshwright.schedule.op import Kind, Op


@dataclass(frozen=True)
class Receive:
    """Wait for the result of `op`, which pipeline rank `peer` computes."""

    op: Op
    peer: int

    def __str__(self) -> str:
        return f"RECV {self.op} from {self.peer}"


@dataclass(frozen=True)
class Send:
    """Hand the result of `op`, computed here, to pipeline rank `peer`, which needs it."""

    op: Op
    peer: int

    def __str__(self) -> str:
        return f"SEND {self.op} to {self.peer}"


@dataclass(frozen=True)
class Forward:
    """The forward pass of one layer (global index)."""

    op: Op
    layer: int

    def __str__(self) -> str:
        return f"F{str(self.op)[1:]}.{self.layer}"


@dataclass(frozen=True)
class Recompute:
    """The forward pass of one layer once more, from its stored input; `op` is the forward op."""

    op: Op
    layer: int

    def __str__(self) -> str:
        return f"R{str(self.op)[1:]}.{self.layer}"


@dataclass(frozen=True)
class Backward:
    """The backward pass of one layer (global index)."""

    op: Op
    layer: int

    def __str__(self) -> str:
        return f"B{str(self.op)[1:]}.{self.layer}"


@dataclass(frozen=True)
class Gather:
    """Make a unit's parameters whole from the shards."""

    unit: str

    def __str__(self) -> str:
        return f"GATHER {self.unit}"


@dataclass(frozen=True)
class Release:
    """Keep only this rank's shard of a unit's parameters."""

    unit: str

    def __str__(self) -> str:
        return f"RELEASE {self.unit}"


@dataclass(frozen=True)
class Reduce:
    """Sum a unit's gradient over the ranks that divide its states: whole under ZeRO 0, into the shards under 1 to 3."""

    unit: str

    def __str__(self) -> str:
        return f"REDUCE {self.unit}"


@dataclass(frozen=True)
class Sync:
    """Sum the gradient that this rank owns of a unit over its replicas (HSDP)."""

    unit: str

    def __str__(self) -> str:
        return f"SYNC {self.unit}"


@dataclass(frozen=True)
class Tied:
    """Sum a tied unit's gradient over the pipeline stages that hold it."""

    unit: str

    def __str__(self) -> str:
        return f"TIE {self.unit}"


@dataclass(frozen=True)
class Step:
    """Update the parameters."""

    def __str__(self) -> str:
        return "STEP"


Compute: TypeAlias = Forward | Recompute | Backward
Action: TypeAlias = Receive | Send | Forward | Recompute | Backward | Gather | Release | Reduce | Sync | Tied | Step

_UNIT_VERBS: dict[str, type[Gather] | type[Release] | type[Reduce] | type[Sync] | type[Tied]] = {
    "GATHER": Gather,
    "RELEASE": Release,
    "REDUCE": Reduce,
    "SYNC": Sync,
    "TIE": Tied,
}


def parse_action(text: str) -> Action:
    """Read the text form of one action. Raises ValueError for anything else."""
    match text.split():
        case ["STEP"]:
            return Step()
        case [verb, unit] if verb in _UNIT_VERBS:
            return _UNIT_VERBS[verb](unit)
        case ["RECV", op, "from", peer] if peer.isdecimal():
            return Receive(Op.parse(op), int(peer))
        case ["SEND", op, "to", peer] if peer.isdecimal():
            return Send(Op.parse(op), int(peer))
        case [compute] if match := re.fullmatch(r"([FRB])([0-9]+@[0-9]+)\.([0-9]+)", compute):
            layer = int(match[3])
            if match[1] == "B":
                return Backward(Op.parse(f"{Kind.BACKWARD}{match[2]}"), layer)
            forward = Op.parse(f"{Kind.FORWARD}{match[2]}")
            return Recompute(forward, layer) if match[1] == "R" else Forward(forward, layer)
        case _:
            raise ValueError(f'"{text}" is not an action; actions read like F3@1.4, RECV B3@2 from 2, GATHER 4 or STEP')


@dataclass(frozen=True)
class Program:
    """The actions of one pipeline rank, in order."""

    rank: int
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return "\n".join((self._heading, *map(str, self.actions)))

    @property
    def _heading(self) -> str:
        return f"program of rank {self.rank}"

    @classmethod
    def parse(cls, text: str) -> Program:
        """Read the text form. Raises ValueError naming the line that does not read."""
        heading, *lines = text.strip().splitlines()
        match = re.fullmatch(r"program of rank ([0-9]+)", heading.strip())
        if match is None:
            raise ValueError(f'"{heading}" does not begin a program; it reads like "program of rank 0"')
        return cls(int(match[1]), tuple(map(parse_action, lines)))

    def picture(self, at: int, around: int = 5) -> str:
        """The actions around index `at`, numbered, with `>` before that one: for errors.

        `at` may be the number of actions: the place after the last.
        """
        first, last = max(0, at - around), min(len(self.actions), at + around + 1)
        width = len(str(last))
        rows = [f"{'>' if index == at else ' '} {index:{width}}  {self.actions[index]}" for index in range(first, last)]
        if at >= len(self.actions):
            rows.append(f"> {len(self.actions):{width}}  (end)")
        above = [f"  {'':{width}}  ... {first} before"] if first else []
        below = [f"  {'':{width}}  ... {len(self.actions) - last} after"] if last < len(self.actions) else []
        return "\n".join((self._heading, *above, *rows, *below))
