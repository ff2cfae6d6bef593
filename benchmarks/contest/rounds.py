"""Turns: all systems of a match are set up once, and then train one after the other, round after round.

    watched  A  B  C         not timed: who looks at the memory of a process holds it up
    round 1  A  B  C         timed
    round 2  C  B  A         the other way round, so that what changes slowly changes for all alike
    ...

Whoever is not on turn sleeps. What else the machine does in the meantime hits the systems of a round alike, which is
why speeds are compared within rounds. A round that was disturbed much is played again, and the quietest ones count.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median

from contest import memory
from contest.catalogue import SYSTEMS, Match
from contest.rank import Turn
from contest.team import Team, TeamError

WARM = 3
"""Steps before anything is measured."""


PATIENCE = 60.0
"""Seconds that a round waits for a quiet machine."""


@dataclass(frozen=True)
class Plan:
    """How much of everything.

    Args:
        rounds: that count.
        steps: in each turn.
        quiet: how many processors everything else on the machine may use during a round that is not played again.
        watched: steps during which memory is watched.
    """

    rounds: int
    steps: int
    quiet: float
    watched: int = 4

    @property
    def attempts(self) -> int:
        """Rounds at most."""
        return 3 * self.rounds


@dataclass(frozen=True)
class Round:
    """Seconds of a step of each system, and how many processors everything else on the machine used meanwhile."""

    seconds: Mapping[str, float]
    others: float


@dataclass
class Record:
    """What one system did in a match.

    Args:
        peak: bytes of all ranks together, beyond the imports.
        losses: of the steps while memory was watched, the mean of the ranks' losses.
        idle: the largest share of a processor that its processes used together while another system was on turn.
        error: why there is nothing, or nothing more.
    """

    name: str
    peak: int = 0
    losses: list[float] = field(default_factory=list)
    idle: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Result:
    """A match that was played: what each system did, in its order, and the rounds that count."""

    match: Match
    records: tuple[Record, ...]
    rounds: tuple[Round, ...]


class Field:
    """The systems of a match that still take part; whoever fails leaves, and the others go on."""

    def __init__(self, match: Match, folder: Path) -> None:
        self.records = {name: Record(name) for name in match.names}
        self._teams: dict[str, Team] = {}
        for name, record in self.records.items():
            module = SYSTEMS[name].module
            if module and find_spec(module) is None:
                record.error = f"skipped: {module} is not installed"
            else:
                self._teams[name] = Team(name, match.work, folder)

    def end(self) -> None:
        """End every process."""
        for team in self._teams.values():
            team.end()

    def set_up(self) -> None:
        """Import everywhere before anything is set up, so that no import disturbs what is measured."""
        self._each(lambda record, team: team.wait_until_imported())
        self._each(_set_up)

    def watch(self, steps: int) -> None:
        """Watch the memory of each while it trains."""

        def watch(record: Record, team: Team) -> None:
            record.peak, turns = team.watched(steps)
            record.losses = [sum(losses) / len(turns) for losses in zip(*(turn.losses for turn in turns), strict=True)]

        self._each(watch)

    def play(self, steps: int, backwards: bool) -> Round:
        """One round."""
        seconds: dict[str, float] = {}

        def play(record: Record, team: Team) -> None:
            begun, before = time.perf_counter(), self._worked(record)
            seconds[record.name] = _seconds(team.train(steps))
            taken = time.perf_counter() - begun
            for other, after in self._worked(record).items():
                record = self.records[other]
                record.idle = max(record.idle, (after - before[other]) / taken)

        begun, everything, own = time.perf_counter(), memory.all_worked(), sum(self._worked().values())
        self._each(play, backwards)
        others = memory.all_worked() - everything - (sum(self._worked().values()) - own)
        return Round(seconds, max(0.0, others) / (time.perf_counter() - begun))

    def _worked(self, but: Record | None = None) -> dict[str, float]:
        """How long the processes of every (other) system have been computing."""
        return {name: team.worked for name, team in self._teams.items() if but is None or name != but.name}

    def _each(self, act: Callable[[Record, Team], None], backwards: bool = False) -> None:
        """Let one after the other act; who fails takes no further part."""
        for name in tuple(self._teams)[:: -1 if backwards else 1]:
            try:
                act(self.records[name], self._teams[name])
            except TeamError as error:
                self.records[name].error = str(error)
                self._teams.pop(name).end()


def contest(match: Match, plan: Plan) -> Result:
    """Let all systems of the match take turns."""
    with tempfile.TemporaryDirectory(prefix="peers-") as folder, ExitStack() as stack:
        systems = Field(match, Path(folder))
        stack.callback(systems.end)
        say(f"{match}: sets up {', '.join(match.names)}")
        systems.set_up()
        systems.watch(plan.watched)
        rounds: list[Round] = []
        while len(rounds) < plan.attempts and sum(each.others <= plan.quiet for each in rounds) < plan.rounds:
            _wait_for_quiet(plan.quiet)
            say(f"{match}: round {len(rounds) + 1}, of which {plan.rounds} quiet ones count")
            rounds.append(systems.play(plan.steps, backwards=len(rounds) % 2 == 1))
        rounds.sort(key=lambda each: each.others)
        return Result(match, tuple(systems.records.values()), tuple(rounds[: plan.rounds]))


def _wait_for_quiet(quiet: float) -> None:
    """Return when hardly anything else runs, or after a while."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        before = memory.all_worked()
        time.sleep(0.5)
        if memory.all_worked() - before <= 0.5 * quiet:
            return


def say(text: str) -> None:
    """Tell whoever waits how far it is."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _set_up(record: Record, team: Team) -> None:
    team.prepare()
    team.train(WARM)


def _seconds(turns: list[Turn]) -> float:
    """The median step; each lasts from the end of the one before it on all ranks to its own."""
    begun = min(turn.begun for turn in turns)
    ends: list[float] = [max(ends) for ends in zip(*(turn.ended for turn in turns), strict=True)]
    return median([end - start for start, end in pairwise([begun, *ends])])
