"""The table at the end of a run: what was measured stands beside formulas that it does not exceed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.comm.connect import Groups, solo
from meshwright.costs.spec import GPTSpec
from meshwright.engine.meter import Footprint, Meter
from meshwright.layout.layout import Layout
from meshwright.model.split import cut_layers
from meshwright.parallel.precision import Precision
from meshwright.train.parity import Case, make_engine, train_step
from meshwright.train.summary import Work, all_ranks, buffer_formula, formula, parameters_on_rank, table, write
from pool import RankPool

# Sizes that 2 and 4 divide, so that nothing is padded.
SPEC = GPTSpec(layers=3, hidden=32, heads=4, sequence=16, vocabulary=64)
FOOTPRINT = Footprint(parameters=1_000_000, gradients=2, optimizer=3, buffers=4, activations=5_000_000, host=0)


def work(text: str, spec: GPTSpec = SPEC, dtype: torch.dtype = torch.float64, batch: int = 8) -> Work:
    layout = Layout.parse(text)
    return Work(spec, layout, cut_layers(spec, layout.pipeline), Precision.of(dtype), batch)


def footprints(groups: Groups, plan: Work) -> list[Footprint]:
    """Of every rank, in the second step."""
    case = Case(plan.spec, batch=plan.batch)
    engine = make_engine(case, plan.layout, groups)
    meter = Meter(groups.device)
    train_step(engine, case, 0, lambda: None)
    with meter:
        train_step(engine, case, 1, lambda: None)
    return all_ranks(groups.world, meter.footprint(engine), groups.device)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        "dp2/zero2",
        "dp2/zero3/m2/recompute-full",
        "dp2.tp2/zero2/m2/recompute-full/pa",
        "pp2/m4/recompute-full",
        "pp2/gpipe/m4/recompute-full",
        "tp2/m2/recompute-full",
    ],
)
def test_buffers_of_a_step_are_at_most_what_the_formula_says(gloo_pool: RankPool, text: str, tied: bool) -> None:
    plan = work(text, replace(SPEC, tied=tied))
    expected = buffer_formula(plan)
    for answer in gloo_pool.run(plan.layout.mesh, footprints, plan):
        assert all(0.7 * most <= own.buffers <= most for own, most in zip(answer, expected, strict=True))
        assert answer[0].peak > 0


def test_where_gradients_are_whole_and_nothing_is_recomputed_there_are_no_buffers() -> None:
    assert buffer_formula(work("dp2.tp2/zero1/m2")) == [0] * 4
    assert footprints(solo(), work("m2"))[0].buffers == 0


def test_checkpoints_are_exactly_the_inputs_of_all_layers_in_flight() -> None:
    plan = work("m4/recompute-full")
    assert buffer_formula(plan) == [4 * 2 * 16 * 32 * 8]  # three blocks and the head, two samples
    assert footprints(solo(), plan)[0].buffers == buffer_formula(plan)[0]


def test_the_formula_divides_over_the_ranks_that_divide_and_not_over_replicas() -> None:
    def states(text: str) -> int:
        plan = work(text)
        return formula(plan.spec, plan.layout, plan.cut, plan.precision)[0].optimizer

    assert states("dp4/zero1") == states("dp1") // 4
    assert states("dp4/zero1/shard2") == states("dp1") // 2
    assert states("dp4/zero3/shard1") == states("dp1")


def test_on_the_host_the_optimizer_holds_a_copy_of_the_weights_in_any_precision() -> None:
    for dtype, nbytes in ((torch.float32, 12), (torch.bfloat16, 12)):
        plan = work("offload", dtype=dtype)
        count = parameters_on_rank(plan.spec, plan.cut, 0, 1)
        assert formula(plan.spec, plan.layout, plan.cut, plan.precision)[0].optimizer == nbytes * count


def test_the_table_has_a_row_for_every_rank_and_says_what_was_measured() -> None:
    lines = table(work("pp2/m2"), [FOOTPRINT] * 2, with_step=True).splitlines()
    assert [line.split()[:2] for line in lines[2:4]] == [["0", "0.0.0"], ["1", "0.1.0"]]
    assert lines[1].split()[-2:] == ["activations", "peak"]
    assert lines[2].split()[-2:] == ["5.000", "6.000"]
    without = table(work("pp2/m2"), [FOOTPRINT] * 2, with_step=False).splitlines()
    assert without[1].split()[-1] == "buffers"


def test_the_table_says_which_states_are_on_the_host_and_leaves_them_out_of_the_peak() -> None:
    text = table(work("offload"), [replace(FOOTPRINT, optimizer=0, host=9_000_000)], with_step=True)
    assert "optimizer on host" in text
    assert "9.000" in text
    assert text.splitlines()[2].split()[-1] == "6.000"


def test_the_bytes_of_all_ranks_are_written_as_json(tmp_path: Path) -> None:
    write([FOOTPRINT] * 2, tmp_path)
    rows = json.loads((tmp_path / "memory.json").read_text())
    assert [row["rank"] for row in rows] == [0, 1]
    assert rows[0]["peak"] == FOOTPRINT.peak
    assert rows[0]["activations"] == 5_000_000
