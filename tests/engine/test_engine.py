"""The engine's edges: what it refuses, what it shows when something fails, what it traces."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from meshwright.comm.connect import Groups, solo
from meshwright.costs.spec import GPTSpec
from meshwright.engine.build import build
from meshwright.engine.engine import Engine
from meshwright.engine.tracer import Tracer
from meshwright.layout.layout import Layout
from meshwright.layout.zero import ZeroStage
from meshwright.model.batch import MicroBatch
from meshwright.schedule.timeline import Timeline
from meshwright.train.parity import Case, make_engine, train_step
from pool import RankPool

SPEC = GPTSpec(layers=2, hidden=8, heads=4, sequence=4, vocabulary=13)


def sgd(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def batches(count: int) -> list[MicroBatch]:
    tokens = torch.ones(1, 4, dtype=torch.int64)
    return [MicroBatch(tokens, tokens)] * count


def test_another_number_of_micro_batches_than_the_layout_says_is_refused() -> None:
    engine = build(SPEC, Layout(micro_batches=4), solo(), sgd)
    with pytest.raises(ValueError, match=r"3 micro-batches were given; the layout .*/m4 takes 4"):
        engine.step(batches(3), 0.1)


def test_an_error_in_a_layer_shows_the_rank_the_action_and_the_program_around_it() -> None:
    engine = build(SPEC, Layout(micro_batches=2), solo(), sgd)
    tokens = torch.full((1, 4), 99)
    with pytest.raises(ValueError, match="token 99 is outside the vocabulary of 13") as raised:
        engine.step([*batches(1), MicroBatch(tokens, tokens)], 0.1)
    (note,) = raised.value.__notes__
    assert "rank 0 stands at action" in note
    assert any(line.startswith(">") and "F1@0.0" in line for line in note.splitlines())


def test_nothing_of_a_step_is_left_when_it_is_over() -> None:
    engine = build(SPEC, Layout(micro_batches=2), solo(), sgd)
    flight = engine._run(engine.program, batches(2), None)
    assert not (flight.inputs or flight.kept or flight.outputs or flight.activation or flight.gradient)


def test_zero_over_one_data_rank_divides_nothing() -> None:
    program = str(build(SPEC, Layout(zero=ZeroStage.PARAMETERS), solo(), sgd).program)
    assert "GATHER" not in program


def traced(groups: Groups, layout: Layout) -> Timeline:
    engine = make_engine(Case(SPEC), layout, groups)
    tracer = Tracer(groups.pipeline.index, groups.device)
    case = Case(SPEC)
    train_step(engine, case, 0, lambda: None)
    engine.step(batches(layout.micro_batches), 0.1, tracer=tracer)
    return tracer.timeline()


def test_a_traced_step_names_every_action_in_order_and_time(pool: RankPool) -> None:
    layout = Layout(pipeline=2, micro_batches=2)
    for rank, timeline in enumerate(pool.run(layout.mesh, traced, layout)):
        labels = [span.label for span in timeline.spans]
        assert labels[-1] == "STEP"
        assert {span.rank for span in timeline.spans} == {rank}
        assert all(a.end == b.start for a, b in pairwise(timeline.spans))
        assert timeline.spans[0].start == 0
        assert all(span.end >= span.start for span in timeline.spans)


def evaluated(groups: Groups, layout: Layout) -> float:
    engine: Engine = build(SPEC, layout, groups, sgd, dtype=torch.float64)
    tokens = torch.arange(layout.data * layout.micro_batches * 4).view(-1, 1, 4) % 13
    mine = tokens[groups.data.index :: layout.data]
    return engine.evaluate([MicroBatch(row, row) for row in mine]).loss


@pytest.mark.parametrize("text", ["dp2/zero3/m2", "pp2/m4", "tp2/m4", "dp2.pp2/zero1/gpipe/m2"])
def test_evaluation_gives_the_loss_of_one_process(pool: RankPool, text: str) -> None:
    layout = Layout.parse(text)
    expected = evaluated(solo(), Layout(micro_batches=4))
    for loss in pool.run(layout.mesh, evaluated, layout):
        assert loss == pytest.approx(expected, rel=1e-12)
