"""The text pictures of `meshwright show`."""

from __future__ import annotations

import pytest

from meshwright.costs.spec import GPTSpec
from meshwright.layout.layout import Layout
from meshwright.report.text import WIDTH, show

PICTURE = """\
dp2.tp2.pp4/zero1/1f1b/m8   16 ranks

mesh: pipelines run to the right, data-parallel copies stand below each other, [tensor group]
          pp 0        pp 1        pp 2        pp 3
  dp 0  [ 0  1] ──► [ 2  3] ──► [ 4  5] ──► [ 6  7]
  dp 1  [ 8  9] ──► [10 11] ──► [12 13] ──► [14 15]

schedule 1f1b: time to the right, a backward takes two forwards, · is idle
  pp 0  F0 F1 F2 F3 ·  ·  ·  ·  ·  ·  B0─── F4 B1─── F5 B2─── F6 B3─── F7 B4─── ·  B5─── ·  B6─── ·  B7───
  pp 1  ·  F0 F1 F2 ·  ·  ·  ·  B0─── F3 B1─── F4 B2─── F5 B3─── F6 B4─── F7 B5─── ·  B6─── ·  B7─── ·  ·
  pp 2  ·  ·  F0 F1 ·  ·  B0─── F2 B1─── F3 B2─── F4 B3─── F5 B4─── F6 B5─── F7 B6─── ·  B7─── ·  ·  ·  ·
  pp 3  ·  ·  ·  F0 B0─── F1 B1─── F2 B2─── F3 B3─── F4 B4─── F5 B5─── F6 B6─── F7 B7─── ·  ·  ·  ·  ·  ·

bubble      3/11 = 27.3% simulated; (p-1)/(m+p-1) = 3/11 in theory, for p=4 and m=8
in flight   4 3 2 1 micro-batches at most, by pipeline rank; min(m, p - rank) in theory
zero 1      parameters whole, gradients whole, optimizer states 1/2 on each data-parallel rank
"""


def test_the_picture_of_the_readme_is_drawn() -> None:
    assert show(Layout.parse("dp2.tp2.pp4/zero1/1f1b/m8")).startswith(PICTURE)


def facts(layout: str, rank: int = 0) -> list[str]:
    lines = show(Layout.parse(layout), rank).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("zero"))
    return lines[start : lines.index("", start)]


def test_runs_of_shards_and_their_replicas_are_named_for_the_rank_in_question() -> None:
    assert facts("dp4.tp2/zero3/shard2/prefetch2/offload", rank=3) == [
        "zero 3      parameters 1/2, gradients 1/2, optimizer states 1/2 on its host on each data-parallel rank",
        "gathered    at most 3 at a time: the layer in use and 2 on the way",
        "shards      2 ranks divide the states, those with rank 3: 1 3",
        "replicas    2 ranks hold each part, that of rank 3: 3 7",
    ]
    assert facts("dp64/zero1/shard2", rank=5)[1:] == [
        "shards      2 ranks divide the states, those with rank 5: 4 5",
        "replicas    32 ranks hold each part, that of rank 5: 1 3 5 7 9 11 13 ... 59 61 63",
    ]


def test_what_is_not_divided_is_shown_whole() -> None:
    whole = "parameters whole, gradients whole, optimizer states whole on each data-parallel rank"
    assert facts("dp4/zero0/shard2") == [f"zero 0      {whole}"]
    assert facts("dp1/zero3") == [f"zero 3      {whole}"]
    assert facts("dp2/zero3/prefetch0")[1] == "gathered    at most 1 at a time: the layer in use and 0 on the way"


def test_a_sum_over_replicas_stands_with_the_op_that_made_it() -> None:
    program = show(Layout.parse("dp4/zero2/shard2/m1"), layers_per_stage=2).partition("program of ")[2]
    assert program.splitlines()[2:] == [
        "  B0@0  B0@0.1  REDUCE 1  B0@0.0  SYNC 1  REDUCE 0  SYNC 0",
        "  step  STEP  GATHER 0  GATHER 1",
    ]


def test_the_program_has_a_line_per_op_and_one_for_the_end_of_the_step() -> None:
    program = show(Layout.parse("dp2.pp2/zero3/1f1b/m1/recompute-full"), rank=0).partition("program of ")[2]
    assert program.splitlines() == [
        "rank 0 (dp 0, pp 0, tp 0; layer 0)",
        "  F0@0  GATHER 0  F0@0.0  RELEASE 0  SEND F0@0 to 1",
        "  B0@0  GATHER 0  R0@0.0  RECV B0@1 from 1  B0@0.0  RELEASE 0  REDUCE 0",
        "  step  STEP",
    ]


def test_the_program_is_that_of_the_ranks_pipeline_stage() -> None:
    text = show(Layout.parse("dp2.tp2.pp2/m1"), rank=7, layers_per_stage=2)
    assert "program of rank 7 (dp 1, pp 1, tp 1; layers 2 to 3)" in text
    assert "  F0@1  RECV F0@0 from 0  F0@1.2  F0@1.3" in text


def test_a_models_own_layers_are_cut_by_their_cost_and_tied() -> None:
    text = show(Layout.parse("pp2/m1"), rank=0, spec=GPTSpec(layers=4))
    assert "layers 0 to 2" in text
    assert "TIE tied  STEP" in text


@pytest.mark.parametrize(
    "layout",
    [
        "dp1",
        "dp3.tp16.pp2/m3",
        "dp64.tp8.pp16/m64/zero3/recompute-full",
        "dp1.pp24/gpipe/m2",
        "pp4/m120",
        "dp2.tp64.pp3/m1",
        "dp4096.tp8/zero3/shard64/prefetch10/offload/m2",
    ],
)
@pytest.mark.parametrize("layers_per_stage", [1, 12])
def test_no_picture_is_wider_than_the_page_or_ends_in_blanks(layout: str, layers_per_stage: int) -> None:
    lines = show(Layout.parse(layout), layers_per_stage=layers_per_stage).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert all(line == line.rstrip() for line in lines)
    assert len(lines) < 200


def test_what_is_left_out_is_counted() -> None:
    text = show(Layout.parse("dp64.pp20/m64"))
    assert "⋮  56 more data-parallel copies" in text
    assert "⋮  4 more ranks" in text
    assert "units of time left out" in text
    assert "more ops" in text


def test_a_rank_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="rank 4 is not on a mesh of 4 ranks; take 0 to 3"):
        show(Layout.parse("dp2.pp2"), rank=4)
