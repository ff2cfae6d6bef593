"""Pictures on a character grid."""

from __future__ import annotations

from meshwright.layout.layout import ScheduleName
from meshwright.layout.mesh import Mesh
from meshwright.planner.simulate import simulate
from meshwright.report.grid import excerpt, mesh_picture, time_picture
from meshwright.schedule.catalog import build
from meshwright.schedule.op import Kind


def test_an_excerpt_shows_what_fits_and_counts_the_rest() -> None:
    assert excerpt(5, 5).hidden == 0
    shown = excerpt(100, 6)
    assert (list(shown.first), list(shown.last), shown.hidden) == ([0, 1, 2, 3], [98, 99], 94)


def test_a_mesh_of_one_is_drawn_like_any_other() -> None:
    assert mesh_picture(Mesh(), 80) == ["        pp 0", "  dp 0  [0]"]


def test_a_long_pipeline_is_drawn_with_its_ends() -> None:
    assert mesh_picture(Mesh(pipeline=50), 40)[1] == "  dp 0   [ 0] ──► ··· ──►  [49]"


def test_a_wide_timeline_is_drawn_in_bands_below_each_other() -> None:
    schedule = build(ScheduleName.GPIPE, 2, 3)
    timeline = simulate(schedule, lambda op: 1 if op.kind is Kind.FORWARD else 2)
    assert time_picture(timeline, 80) == [
        "  pp 0  F0 F1 F2 ·  ·  ·  B0─── B1─── B2───",
        "  pp 1  ·  F0 F1 F2 B0─── B1─── B2─── ·  ·",
    ]
    assert time_picture(timeline, 22)[0] == "  pp 0  F0 F1 F2 ·"
    assert time_picture(timeline, 28) == [
        "  pp 0  F0 F1 F2 ·  ·  ·",
        "  pp 1  ·  F0 F1 F2 B0───",
        "",
        "  pp 0  B0─── B1─── B2───",
        "  pp 1  B1─── B2─── ·  ·",
    ]
