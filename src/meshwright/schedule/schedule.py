"""A schedule: the order of ops on each pipeline rank, its checks and its text form.

Only order. No times and no gaps (`timeline` has those), no messages (`passes` adds them), no tensors.

    1f1b stages=2 micro-batches=3
    0: F0@0 F1@0 B0@0 F2@0 B1@0 B2@0
    1: F0@1 B0@1 F1@1 B1@1 F2@1 B2@1

`problems` proves what the runtime relies on: every op happens once, on the rank of its stage; nobody waits for ever;
and each directed channel between two ranks is consumed in the order it is sent, so that messages need no tags. GPipe,
section 2.2; Narayanan et al., 2021, section 2.2.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.schedule.op import Kind, Op, needs


@dataclass(frozen=True, order=True)
class Channel:
    """A directed path of one kind of traffic between two pipeline ranks: activations (F) or gradients (B)."""

    source: int
    target: int
    kind: Kind


@dataclass(frozen=True)
class Schedule:
    """One tuple of ops per pipeline rank (index = pipeline rank), for `micro_batches` passing through `stages`.

    `name` is one word. Nothing is checked at construction: ask `problems` or call `check`. A schedule without any
    backward is forward only (evaluation).
    """

    name: str
    stages: int
    micro_batches: int
    ranks: tuple[tuple[Op, ...], ...]

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage: stages go round the ranks (one each, where there are as many)."""
        return stage % len(self.ranks)

    @property
    def trains(self) -> bool:
        """Whether there is a backward at all."""
        return any(op.kind is Kind.BACKWARD for ops in self.ranks for op in ops)

    def in_order(self) -> Iterator[Op]:
        """The ops in an order that keeps each rank's own and every need.

        Ranks take turns, each going on as long as it can. Where the rest waits for ever the iterator ends early.
        """
        done: set[Op] = set()
        position = [0] * len(self.ranks)
        moved = True
        while moved:
            moved = False
            for rank, ops in enumerate(self.ranks):
                while position[rank] < len(ops) and done.issuperset(needs(ops[position[rank]], self.stages)):
                    op = ops[position[rank]]
                    done.add(op)
                    position[rank] += 1
                    moved = True
                    yield op

    def in_flight(self, rank: int) -> int:
        """The most forwards of one rank that wait for a backward at the same time: the activations it must hold.

        A forward whose backward never comes (forward only) holds nothing.
        """
        backwards = {op for op in self.ranks[rank] if op.kind is Kind.BACKWARD}
        held = peak = 0
        for op in self.ranks[rank]:
            if op.kind is Kind.BACKWARD:
                held -= 1
            elif Op(Kind.BACKWARD, op.micro_batch, op.stage) in backwards:
                held += 1
                peak = max(peak, held)
        return peak

    def problems(self) -> tuple[str, ...]:
        """Everything wrong with it, a sentence each; empty when it will run.

        Waiting and channels are judged only once every op is there and in its place, since they mean nothing before.
        """
        misplaced = (*self._incomplete(), *self._misplaced())
        return misplaced or (*self._deadlock(), *self._out_of_turn())

    def check(self) -> None:
        """Raise ValueError with every problem, if there is one."""
        problems = self.problems()
        if problems:
            heading = f"schedule {self.name} (stages={self.stages}, micro-batches={self.micro_batches}) cannot run:"
            raise ValueError("\n  ".join((heading, *problems)))

    def _expected(self) -> Iterator[Op]:
        kinds = (Kind.FORWARD, Kind.BACKWARD) if self.trains else (Kind.FORWARD,)
        for kind in kinds:
            for micro_batch in range(self.micro_batches):
                for stage in range(self.stages):
                    yield Op(kind, micro_batch, stage)

    def _incomplete(self) -> Iterator[str]:
        sizes = (len(self.ranks), self.stages, self.micro_batches)
        if min(sizes) < 1:
            yield "ranks={}, stages={}, micro-batches={}: each must be at least 1".format(*sizes)
            return
        counts = Counter(op for ops in self.ranks for op in ops)
        expected = dict.fromkeys(self._expected())
        for op in expected:
            if op not in counts:
                yield f"{op} is missing; it belongs to rank {self.rank_of(op.stage)}"
            elif counts[op] > 1:
                yield f"{op} happens {counts[op]} times; once is right"
        for op in sorted(set(counts) - set(expected)):
            yield f"{op} is none of stages 0 to {self.stages - 1} and micro-batches 0 to {self.micro_batches - 1}"

    def _misplaced(self) -> Iterator[str]:
        for rank, ops in enumerate(self.ranks):
            for op in ops:
                if op.stage < self.stages and self.rank_of(op.stage) != rank:
                    yield f"{op} stands on rank {rank}; stage {op.stage} belongs to rank {self.rank_of(op.stage)}"

    def _deadlock(self) -> Iterator[str]:
        done = set(self.in_order())
        for rank, ops in enumerate(self.ranks):
            stuck = next((op for op in ops if op not in done), None)
            if stuck is not None:
                missing = ", ".join(str(op) for op in needs(stuck, self.stages) if op not in done)
                yield f"rank {rank} waits for ever: it stands at {stuck}, which needs {missing}"

    def _out_of_turn(self) -> Iterator[str]:
        sent: dict[Channel, list[Op]] = defaultdict(list)
        taken: dict[Channel, list[Op]] = defaultdict(list)
        for rank, ops in enumerate(self.ranks):
            for op in ops:
                for need in needs(op, self.stages):
                    taken[Channel(self.rank_of(need.stage), rank, need.kind)].append(need)
        place = {op: index for ops in self.ranks for index, op in enumerate(ops)}
        for channel, ops_taken in taken.items():
            sent[channel] = sorted(ops_taken, key=place.__getitem__)
        for channel in sorted(taken):
            if channel.source == channel.target:
                continue
            for first, (given, wanted) in enumerate(zip(sent[channel], taken[channel], strict=True)):
                if given != wanted:
                    yield (
                        f"message {first} from rank {channel.source} to rank {channel.target} is {given}, "
                        f"but rank {channel.target} takes {wanted} first; take them in the order they are sent"
                    )
                    break

    def __str__(self) -> str:
        heading = f"{self.name} stages={self.stages} micro-batches={self.micro_batches}"
        rows = (" ".join((f"{rank}:", *map(str, ops))) for rank, ops in enumerate(self.ranks))
        return "\n".join((heading, *rows))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read the text form. Raises ValueError naming the line that does not read."""
        heading, *rows = text.strip().splitlines()
        match = re.fullmatch(r"(\S+) stages=([0-9]+) micro-batches=([0-9]+)", heading.strip())
        if match is None:
            raise ValueError(f'"{heading}" does not begin a schedule; it reads like "1f1b stages=4 micro-batches=8"')
        ranks: list[tuple[Op, ...]] = []
        for row in rows:
            label, *ops = row.split()
            if label != f"{len(ranks)}:":
                raise ValueError(f'the row "{row}" begins with "{label}"; the next rank is "{len(ranks)}:"')
            ranks.append(tuple(map(Op.parse, ops)))
        return cls(match[1], int(match[2]), int(match[3]), tuple(ranks))
