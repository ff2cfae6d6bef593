"""What `meshwright doctor comm` asks for and finds: each rank's measurements, put together, and how they are shown.

Values only, without torch: the ranks write theirs to files, and the launcher reads them. Measured by `doctor.py`.

The limit is the time in which a rank reads and writes what no transport of this machine can avoid, at the rate at which
all ranks copy large tensors at the same time. What stays in a cache can be quicker, and so can ranks that share their
tensors instead of sending them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, assert_never

from meshwright.comm.ledger import Kind, sent_bytes
from meshwright.layout.mesh import Mesh


@dataclass(frozen=True)
class Examination:
    """What is to be examined: the mesh, payloads in bytes, how often each is timed, and the folder for the reports."""

    mesh: Mesh
    payloads: tuple[int, ...]
    repeats: int
    folder: Path

    def report(self, rank: int) -> Path:
        """The file of a rank."""
        return self.folder / f"rank-{rank}.json"


@dataclass(frozen=True)
class Measurement:
    """One collective, or message, on one axis, as one rank saw it.

    Args:
        axis: of the mesh.
        ranks: along that axis.
        transport: what carries it.
        kind: what is done.
        payload: bytes of the whole tensor.
        seconds: median.
        wrong: results that were not what they must be; empty if all were right.
    """

    axis: str
    ranks: int
    transport: str
    kind: Kind
    payload: int
    seconds: float
    wrong: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """Bytes that a rank sends per second, by the ledger's rule."""
        return sent_bytes(self.kind, self.payload, self.ranks) / self.seconds

    def limit(self, copy_rate: float) -> float:
        """Seconds that it takes at least where a rank copies `copy_rate` bytes per second."""
        return moved_bytes(self.kind, self.payload, self.ranks) / (2 * copy_rate)


def moved_bytes(kind: Kind, payload: int, ranks: int) -> int:
    """Bytes that each of `ranks` ranks reads and writes at least; a copy reads and writes each byte once."""
    match kind:
        case Kind.ALL_REDUCE:  # reads its part of all, writes it, reads the others' parts, writes them
            return 3 * payload
        case Kind.REDUCE_SCATTER:
            return payload + payload // ranks
        case Kind.ALL_GATHER | Kind.ALL_TO_ALL | Kind.SEND:
            return 2 * payload
        case Kind.BROADCAST:
            return 2 * payload * (ranks - 1) // ranks
        case Kind.BARRIER | Kind.RECEIVE:
            return 0
        case _:
            assert_never(kind)


@dataclass(frozen=True)
class RankReport:
    """All that one rank found: bytes per second of a copy while all ranks copy, and the measurements, in one order."""

    copy_rate: float
    measurements: tuple[Measurement, ...]

    def write(self, path: Path) -> None:
        """Leave it for the launcher."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """What a rank left."""
        found = json.loads(path.read_text())
        rows = (row | {"kind": Kind(row["kind"]), "wrong": tuple(row["wrong"])} for row in found["measurements"])
        return cls(found["copy_rate"], tuple(Measurement(**row) for row in rows))


@dataclass(frozen=True)
class Diagnosis:
    """What all ranks of a layout found together."""

    layout: str
    copy_rate: float
    measurements: tuple[Measurement, ...]

    @classmethod
    def of(cls, layout: str, reports: Sequence[RankReport]) -> Diagnosis:
        """The slowest rank's time counts, and what any rank found wrong."""
        rows = zip(*(report.measurements for report in reports), strict=True)
        copy_rate = min(report.copy_rate for report in reports)
        return cls(layout, copy_rate, tuple(_slowest(row) for row in rows))

    @property
    def healthy(self) -> bool:
        """Whether every result was right."""
        return not any(row.wrong for row in self.measurements)

    def json(self) -> str:
        """All of it, for programs: bytes per second, seconds, and the share of the limit that was reached."""
        rows = [
            asdict(row)
            | {"rate": row.rate, "limit": row.limit(self.copy_rate), "reached": row.limit(self.copy_rate) / row.seconds}
            for row in self.measurements
        ]
        whole = {"layout": self.layout, "healthy": self.healthy, "copy_rate": self.copy_rate, "measurements": rows}
        return json.dumps(whole, indent=2)

    def table(self) -> str:
        """All of it, for people."""
        heading = f"{self.layout}: a rank copies {self.copy_rate / 1e9:.1f} GB/s while all do, which sets the limit"
        if not self.measurements:
            return f"{heading}\nno axis has more than one rank, so nothing is communicated"
        columns = f"{'axis':<10}{'ranks':>5}  {'transport':<15}{'collective':<16}{'MB':>8}{'ms':>10}{'GB/s sent':>11}"
        lines = [heading, "", f"{columns}{'limit, ms':>11}{'reached':>9}  result"]
        lines += [self._line(row) for row in self.measurements]
        lines += [f"\n{wrong}" for row in self.measurements for wrong in row.wrong]
        return "\n".join(lines)

    def _line(self, row: Measurement) -> str:
        limit = row.limit(self.copy_rate)
        speed = f"{row.rate / 1e9:>11.2f}{limit * 1e3:>11.3f}{limit / row.seconds:>9.0%}" if limit else " " * 31
        return (
            f"{row.axis:<10}{row.ranks:>5}  {row.transport:<15}{row.kind:<16}{row.payload / 1e6:>8.2f}"
            f"{row.seconds * 1e3:>10.3f}{speed}  {'WRONG' if row.wrong else 'right'}"
        )


def _slowest(row: Sequence[Measurement]) -> Measurement:
    first = row[0]
    assert all((each.axis, each.kind, each.payload) == (first.axis, first.kind, first.payload) for each in row), row
    wrong = tuple(text for each in row for text in each.wrong)
    slowest = max(each.seconds for each in row)
    return Measurement(first.axis, first.ranks, first.transport, first.kind, first.payload, slowest, wrong)
