"""Pictures on a character grid: a mesh, and a timeline with one column per unit of time.

Lines of plain text, no longer than asked; what is too much is left out of the middle, and the picture says so. A
timeline's times must be small whole numbers here (a simulated one in units of a forward); measured ones are for a
plotter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.layout.mesh import Axis, Coordinate, Mesh
from meshwright.schedule.timeline import Span, Timeline

INDENT = "  "


@dataclass(frozen=True)
class Excerpt:
    """The first and last of a sequence of indices, and how many between them are left out."""

    first: range
    last: range

    @property
    def hidden(self) -> int:
        """How many are left out."""
        return self.last.start - self.first.stop


def excerpt(count: int, most: int) -> Excerpt:
    """Indices of `count` things of which at most `most` (>= 2) are shown; two thirds of them from the beginning."""
    if count <= most:
        return Excerpt(range(count), range(count, count))
    last = max(1, most // 3)
    return Excerpt(range(most - last), range(count - last, count))


def mesh_picture(mesh: Mesh, width: int, most_rows: int = 8) -> list[str]:
    """Which rank stands where: pipelines run to the right, data-parallel copies stand below each other.

           pp 0       pp 1
    dp 0  [0 1] ──► [2 3]
    dp 1  [4 5] ──► [6 7]
    """
    label = len(f"dp {mesh.data - 1}  ") + len(INDENT)
    cell = max(len(_cell(mesh, mesh.data - 1, mesh.pipeline - 1)), len(f"pp {mesh.pipeline - 1}"))
    # All stages where they fit; else as many as leave room for the dots.
    fits = (width - label + len(_ARROW)) // (cell + len(_ARROW))
    columns = excerpt(mesh.pipeline, max(2, fits if mesh.pipeline <= fits else fits - 1))
    rows = excerpt(mesh.data, most_rows)
    heading = [f"pp {pipeline}".center(cell) for pipeline in range(mesh.pipeline)]
    lines = [" " * label + _joined(heading, columns, " " * len(_ARROW), "   ")]
    for shown in (rows.first, rows.last):
        if shown is rows.last and rows.hidden:
            lines.append(f"{INDENT}⋮  {rows.hidden} more data-parallel copies")
        for data in shown:
            cells = [_cell(mesh, data, pipeline).center(cell) for pipeline in range(mesh.pipeline)]
            lines.append(f"{INDENT}dp {data}".ljust(label) + _joined(cells, columns, _ARROW, "···"))
    return [line.rstrip() for line in lines]


_ARROW = " ──► "


def _cell(mesh: Mesh, data: int, pipeline: int) -> str:
    """One tensor group: its ranks, or the first and last where there are many."""
    ranks = mesh.group(Axis.TENSOR, mesh.rank(Coordinate(data, pipeline, 0)))
    digits = len(str(mesh.size - 1))
    shown = [f"{rank:{digits}}" for rank in ranks]
    return f"[{' '.join(shown)}]" if len(shown) <= 8 else f"[{shown[0]} to {shown[-1]}]"


def _joined(cells: Sequence[str], columns: Excerpt, between: str, gap: str) -> str:
    first = between.join(cells[column] for column in columns.first)
    last = between.join(cells[column] for column in columns.last)
    return between.join((first, gap, last)) if columns.hidden else first


def time_picture(timeline: Timeline, width: int, most_rows: int = 16, most_bands: int = 3) -> list[str]:
    """One row per rank, time to the right, `·` where the rank is idle; a span is its label drawn out to its length.

    A picture wider than `width` is cut into bands below each other.
    """
    ranks = excerpt(len(timeline.ranks), most_rows)
    label = len(f"pp {timeline.ranks[-1]}  ") + len(INDENT)
    # A cell is one unit of time: the longest label that has to fit into one unit, and a space.
    cell = 1 + max(-(-len(_short(span)) // _units(span)) for span in timeline.spans)
    units = int(timeline.makespan)
    rows = {rank: _row(timeline, rank, cell, units) for rank in timeline.ranks}
    per_band = (width - label) // cell
    bands = excerpt(-(-units // per_band), most_bands)
    starts = [band * per_band for band in bands.first]
    # The last bands are full ones, so that the end of the step is seen whole.
    starts += [units - per_band * back for back in range(len(bands.last), 0, -1)]
    lines: list[str] = []
    shown = 0
    for start in starts:
        if start > shown:
            lines += ["", f"{INDENT}⋮  {start - shown} of {units} units of time left out"]
        lines += [""] if start else []
        shown = start + per_band
        lines += _band({rank: row[start * cell : shown * cell] for rank, row in rows.items()}, ranks, label)
    return [line.rstrip() for line in lines]


def _band(rows: dict[int, str], shown: Excerpt, label: int) -> list[str]:
    ranks = list(rows)
    lines = [f"{INDENT}pp {ranks[index]}".ljust(label) + rows[ranks[index]] for index in shown.first]
    if shown.hidden:
        lines.append(f"{INDENT}⋮  {shown.hidden} more ranks")
    return lines + [f"{INDENT}pp {ranks[index]}".ljust(label) + rows[ranks[index]] for index in shown.last]


def _row(timeline: Timeline, rank: int, cell: int, units: int) -> str:
    row = ["·".ljust(cell)] * units
    for span in timeline.spans:
        if span.rank == rank:
            length = _units(span)
            drawn = _short(span).ljust(length * cell - 1, "─" if length > 1 else " ") + " "
            start = int(span.start)
            row[start : start + length] = [drawn[at * cell : (at + 1) * cell] for at in range(length)]
    return "".join(row)


def _units(span: Span) -> int:
    return int(span.end - span.start)


def _short(span: Span) -> str:
    """The label without the stage, which the row already says."""
    return span.label.partition("@")[0]
