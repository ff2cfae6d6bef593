"""From the records of a match to the figures of the table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from contest.catalogue import SYSTEMS
from contest.rounds import Record, Result


@dataclass(frozen=True)
class Ratio:
    """How one system compares with another: the median over the rounds, or of two sizes; above 1 is more."""

    value: float
    other: str


@dataclass(frozen=True)
class Row:
    """One system in one match.

    Args:
        size, dtype, stage: the match.
        name, title: the system.
        speed, slowest, quickest: tokens/s in the median round and in the extreme ones.
        to_rival: speed beside the quickest rival, in the same rounds.
        to_limit: speed beside the limit, in the same rounds.
        peak: bytes of all ranks together, beyond the imports.
        peak_to_rival: `peak` beside the rival that takes least.
        loss: of the last step that every system made while memory was watched.
        idle: the largest share of a processor that it used while another was on turn.
        others: how many processors everything else on the machine used, in the worst of the rounds that count.
        error: why it has no figures, or stopped.
    """

    size: str
    dtype: str
    stage: int
    name: str
    title: str
    speed: float = 0.0
    slowest: float = 0.0
    quickest: float = 0.0
    to_rival: Ratio | None = None
    to_limit: Ratio | None = None
    peak: int = 0
    peak_to_rival: Ratio | None = None
    loss: float = 0.0
    idle: float = 0.0
    others: float = 0.0
    error: str = ""


def rows(result: Result) -> list[Row]:
    """The figures of every system, in the order of the match."""
    match = result.match
    seconds = {
        record.name: [each.seconds[record.name] for each in result.rounds if record.name in each.seconds]
        for record in result.records
    }
    played = {name: median(each) for name, each in seconds.items() if each}
    limit = min((name for name in match.limits if name in played), key=played.__getitem__, default=None)
    rivals = [record for record in result.records if record.name in match.rivals and record.name in played]
    quickest = min((record.name for record in rivals), key=played.__getitem__, default=None)
    leanest = min(rivals, key=lambda record: record.peak, default=None)

    def row(record: Record) -> Row:
        described = Row(match.work.size, match.work.dtype, match.stage, record.name, SYSTEMS[record.name].title)
        if record.name not in played:
            return replace(described, error=record.error)
        ours = record.name in match.ours
        return replace(
            described,
            speed=match.work.tokens / played[record.name],
            slowest=match.work.tokens / max(seconds[record.name]),
            quickest=match.work.tokens / min(seconds[record.name]),
            to_rival=_speed_beside(result, record, quickest) if ours else None,
            to_limit=_speed_beside(result, record, limit),
            peak=record.peak,
            peak_to_rival=Ratio(record.peak / leanest.peak, leanest.name) if ours and leanest else None,
            loss=record.losses[-1],
            idle=record.idle,
            others=max(each.others for each in result.rounds),
            error=record.error,
        )

    return [row(record) for record in result.records]


def _speed_beside(result: Result, record: Record, other: str | None) -> Ratio | None:
    """From the rounds that both have played."""
    if other is None:
        return None
    both = [each.seconds for each in result.rounds if record.name in each.seconds and other in each.seconds]
    return Ratio(median(seconds[other] / seconds[record.name] for seconds in both), other) if both else None
