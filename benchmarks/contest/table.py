"""The figures as text, a block of lines per match."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from contest.results import Ratio, Row

_HEAD = (
    f"{'system':<33}{'tokens/s':>9}  {'slowest–quickest':<17}{'÷ rival':>8} {'÷ limit':>8} "
    f"{'peak MB':>8} {'÷ rival':>8} {'loss':>8}"
)


def text(rows: Sequence[Row]) -> str:
    """All rows under the headings of their matches."""
    blocks = groupby(rows, lambda row: (row.size, row.dtype, row.stage))
    return "\n\n".join("\n".join(_block(match, list(group))) for match, group in blocks)


def _block(match: tuple[str, str, int], rows: list[Row]) -> Iterable[str]:
    size, dtype, stage = match
    yield f"{size} {dtype}, stage {stage}"
    yield _HEAD
    for row in rows:
        yield _figures(row) if row.speed else f"{row.title:<33}{_last_line(row.error)}"
        if row.speed and row.error:
            yield f"{'':<33}stopped: {_last_line(row.error)}"
    named = {f"speed {row.to_rival.other}" for row in rows if row.to_rival}
    named |= {f"memory {row.peak_to_rival.other}" for row in rows if row.peak_to_rival}
    named |= {f"limit {row.to_limit.other}" for row in rows if row.to_limit}
    idle, others = max(row.idle for row in rows), max(row.others for row in rows)
    yield f"beside {', '.join(sorted(named)) or 'nobody'}; processors used by systems not on turn at most {idle:.3f}, "
    yield f"by everything else on the machine at most {others:.2f}"


def _figures(row: Row) -> str:
    spread = f"{row.slowest:.0f}–{row.quickest:.0f}"
    return (
        f"{row.title:<33}{row.speed:9.0f}  {spread:<17}{_ratio(row.to_rival):>8} {_ratio(row.to_limit):>8} "
        f"{row.peak / 1e6:8.0f} {_ratio(row.peak_to_rival):>8} {row.loss:8.4f}"
    )


def _ratio(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.value:.3f}"


def _last_line(error: str) -> str:
    return error.strip().splitlines()[-1] if error else "no round was played"
