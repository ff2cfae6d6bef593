"""The lowered programs: their text in small cases, and the laws that every one of them keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

import pytest

from meshwright.layout.layout import Recompute as RecomputeMode
from meshwright.layout.zero import ZeroStage
from meshwright.schedule.catalog import forward_only, gpipe, one_f_one_b
from meshwright.schedule.cut import Cut, Tie
from meshwright.schedule.op import Kind, Op
from meshwright.schedule.passes import lower
from meshwright.schedule.program import (
    Action,
    Backward,
    Forward,
    Gather,
    Program,
    Receive,
    Recompute,
    Reduce,
    Release,
    Send,
    Step,
    Tied,
)
from meshwright.schedule.schedule import Schedule


def text_of(schedule: Schedule, rank: int, cut: Cut, zero: int = 0, recompute: str = "none") -> str:
    program = lower(schedule, rank, cut, ZeroStage(zero), RecomputeMode(recompute))
    return "  ".join(map(str, program.actions))


def test_a_middle_stage_receives_before_and_sends_after_its_layers() -> None:
    assert text_of(one_f_one_b(3, 1), 1, Cut((0, 1, 3, 4))) == (
        "RECV F0@0 from 0  F0@1.1  F0@1.2  SEND F0@1 to 2  "
        "RECV B0@2 from 2  B0@1.2  REDUCE 2  B0@1.1  REDUCE 1  SEND B0@1 to 0  STEP"
    )


def test_the_first_recompute_stands_before_the_wait_for_the_gradient() -> None:
    assert text_of(gpipe(2, 1), 0, Cut((0, 2, 3)), recompute="full") == (
        "F0@0.0  F0@0.1  SEND F0@0 to 1  R0@0.1  RECV B0@1 from 1  B0@0.1  REDUCE 1  R0@0.0  B0@0.0  REDUCE 0  STEP"
    )


def test_zero_3_gathers_for_each_use_and_once_for_a_recompute_and_its_backward() -> None:
    cut = Cut((0, 1))
    assert text_of(gpipe(1, 1), 0, cut, zero=3) == (
        "GATHER 0  F0@0.0  RELEASE 0  GATHER 0  B0@0.0  RELEASE 0  REDUCE 0  STEP"
    )
    assert text_of(gpipe(1, 1), 0, cut, zero=3, recompute="full") == (
        "GATHER 0  F0@0.0  RELEASE 0  GATHER 0  R0@0.0  B0@0.0  RELEASE 0  REDUCE 0  STEP"
    )


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (0, "F0@0.0  B0@0.0  F1@0.0  B1@0.0  REDUCE 0  STEP"),
        (1, "F0@0.0  B0@0.0  F1@0.0  B1@0.0  REDUCE 0  STEP  GATHER 0"),
        (2, "F0@0.0  B0@0.0  REDUCE 0  F1@0.0  B1@0.0  REDUCE 0  STEP  GATHER 0"),
    ],
)
def test_the_zero_stage_decides_when_gradients_are_reduced_and_weights_gathered(zero: int, expected: str) -> None:
    assert text_of(one_f_one_b(1, 2), 0, Cut((0, 1)), zero) == expected


def test_a_tie_is_reduced_after_its_last_use_and_summed_over_its_stages() -> None:
    tie = (Tie("tied", (0, 2)),)
    assert text_of(gpipe(1, 1), 0, Cut((0, 3), tie)) == (
        "F0@0.0  F0@0.1  F0@0.2  B0@0.2  REDUCE 2  B0@0.1  REDUCE 1  B0@0.0  REDUCE 0  REDUCE tied  STEP"
    )
    split = Cut((0, 2, 3), tie)
    assert text_of(gpipe(2, 1), 0, split).endswith("TIE tied  STEP")
    assert text_of(gpipe(2, 1), 1, split, zero=1).endswith("TIE tied  STEP  GATHER 2  GATHER tied")


def test_a_stage_between_the_holders_of_a_tie_has_nothing_to_sum() -> None:
    assert "TIE" not in text_of(gpipe(3, 1), 1, Cut((0, 1, 2, 3), (Tie("tied", (0, 2)),)))


def test_evaluation_has_no_backward_no_reduction_and_no_step() -> None:
    cut = Cut((0, 1, 2), (Tie("tied", (0, 1)),))
    assert text_of(forward_only(2, 1), 1, cut, recompute="full") == "RECV F0@0 from 0  F0@1.1"
    assert text_of(forward_only(2, 1), 0, cut, zero=3) == (
        "GATHER 0  GATHER tied  F0@0.0  RELEASE 0  RELEASE tied  SEND F0@0 to 1"
    )


def test_a_cut_for_other_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="the cut has 1 stages and the schedule 2"):
        lower(gpipe(2, 1), 0, Cut((0, 1)), ZeroStage.NONE, RecomputeMode.NONE)


@dataclass
class Machine:
    """Runs one program and holds it to the laws; it knows the papers and nothing of the passes."""

    schedule: Schedule
    rank: int
    cut: Cut
    zero: ZeroStage
    recompute: RecomputeMode
    whole: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    activations: set[tuple[int, int]] = field(default_factory=set)
    gradients: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    reductions: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)
    steps: int = 0
    gathered_after_step: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.zero < 3:
            self.whole.update(self.units)

    @property
    def stages(self) -> list[int]:
        return [stage for stage in range(self.cut.stages) if self.schedule.rank_of(stage) == self.rank]

    @property
    def layers(self) -> list[int]:
        return [layer for stage in self.stages for layer in self.cut.layers(stage)]

    @property
    def units(self) -> set[str]:
        return {unit for layer in self.layers for unit in self.cut.units(layer)}

    def uses(self, unit: str) -> list[int]:
        return [layer for layer in self.layers if unit in self.cut.units(layer)]

    def run(self, program: Program) -> None:
        for action in program.actions:
            self.act(action)
        assert self.whole == (set() if self.zero == 3 else self.units)
        assert self.steps == (1 if self.schedule.trains else 0)
        assert not self.activations or not self.schedule.trains

    def act(self, action: Action) -> None:
        assert not self.steps or isinstance(action, Gather), "only gathers follow the step"
        match action:
            case Receive() | Send():
                pass
            case Forward(op, layer):
                assert self.whole.issuperset(self.cut.units(layer))
                if self.recompute is RecomputeMode.NONE:
                    self.activations.add((op.micro_batch, layer))
            case Recompute(op, layer):
                assert self.recompute is RecomputeMode.FULL
                assert self.whole.issuperset(self.cut.units(layer))
                self.kept.update(self.cut.units(layer))
                self.activations.add((op.micro_batch, layer))
                assert len(self.activations) == 1, "one layer's activations at a time"
            case Backward(op, layer):
                assert self.whole.issuperset(self.cut.units(layer))
                self.activations.remove((op.micro_batch, layer))
                self.kept.difference_update(self.cut.units(layer))
                for unit in self.cut.units(layer):
                    self.gradients[unit].append((op.micro_batch, layer))
            case Gather(unit):
                if self.steps:
                    self.gathered_after_step.append(unit)
                else:
                    assert self.zero == 3
                    assert unit not in self.whole
                    self.whole.add(unit)
            case Release(unit):
                assert self.zero == 3
                assert unit not in self.kept, "released between a recompute and its backward"
                self.whole.remove(unit)
            case Reduce(unit):
                self.reduce(unit)
            case Tied(unit):
                assert not any(self.gradients.values()), "a tie is summed when all is reduced"
                self.tied.append(unit)
            case Step():
                self.step()

    def reduce(self, unit: str) -> None:
        added = self.gradients.pop(unit)
        micro_batches = {micro_batch for micro_batch, _ in added}
        assert len(micro_batches) == (1 if self.zero >= 2 else self.schedule.micro_batches)
        assert sorted(added) == sorted(product(micro_batches, self.uses(unit))), "reduced before its last backward"
        self.reductions.append(unit)

    def step(self) -> None:
        assert not any(self.gradients.values()), "a gradient was never reduced"
        times = self.schedule.micro_batches if self.zero >= 2 else 1
        assert sorted(self.reductions) == sorted(list(self.units) * times)
        shared = [tie.name for tie in self.cut.ties if tie.name in self.units and len(self.cut.tie_stages(tie)) > 1]
        assert self.tied == shared
        self.steps += 1


def _cuts(stages: int) -> Iterator[Cut]:
    for each in (1, 2):
        bounds = tuple(stage * each for stage in range(stages + 1))
        last = bounds[-1] - 1
        yield Cut(bounds)
        yield Cut(bounds, (Tie("tied", (0, last)) if last else Tie("tied", (0,)),))
        yield Cut(bounds, (Tie("tied", tuple(range(last + 1))), Tie("first", (0,))))


CASES = [
    (make(stages, micro_batches), zero, recompute)
    for make, stages, micro_batches in product((gpipe, one_f_one_b, forward_only), (1, 2, 3, 4), (1, 2, 5))
    for zero, recompute in product(ZeroStage, RecomputeMode)
]


def _name(case: tuple[Schedule, ZeroStage, RecomputeMode]) -> str:
    schedule, zero, recompute = case
    return f"{schedule.name}-pp{schedule.stages}-m{schedule.micro_batches}-zero{int(zero)}-{recompute}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_every_program_finds_its_units_whole_and_reduces_each_gradient_after_its_last_backward(
    case: tuple[Schedule, ZeroStage, RecomputeMode],
) -> None:
    schedule, zero, recompute = case
    for cut in _cuts(schedule.stages):
        for rank in range(len(schedule.ranks)):
            machine = Machine(schedule, rank, cut, zero, recompute)
            machine.run(lower(schedule, rank, cut, zero, recompute))
            expected = machine.units if schedule.trains and zero in (1, 2) else set()
            assert sorted(machine.gathered_after_step) == sorted(expected)


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_on_all_ranks_together_every_receive_meets_its_send_in_order(
    case: tuple[Schedule, ZeroStage, RecomputeMode],
) -> None:
    schedule, zero, recompute = case
    cut = Cut(tuple(range(0, 2 * schedule.stages + 1, 2)))
    sent: dict[tuple[int, int, Kind], list[Op]] = defaultdict(list)
    received: dict[tuple[int, int, Kind], list[Op]] = defaultdict(list)
    for rank in range(len(schedule.ranks)):
        actions = lower(schedule, rank, cut, zero, recompute).actions
        computed = [
            (action.op, index) for index, action in enumerate(actions) if isinstance(action, Forward | Backward)
        ]
        first = dict(reversed(computed))
        last = dict(computed)
        for index, action in enumerate(actions):
            if isinstance(action, Send):
                assert index > last[action.op]
                sent[rank, action.peer, action.op.kind].append(action.op)
            if isinstance(action, Receive):
                step = 1 if action.op.kind is Kind.FORWARD else -1
                user = Op(action.op.kind, action.op.micro_batch, action.op.stage + step)
                assert index < first[user]
                received[action.peer, rank, action.op.kind].append(action.op)
    assert sent == received
    kinds = 2 if schedule.trains else 1
    assert sum(map(len, sent.values())) == kinds * schedule.micro_batches * (schedule.stages - 1)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize("zero", ZeroStage)
def test_every_wait_for_a_gradient_follows_the_first_recompute(
    make: Callable[[int, int], Schedule], zero: ZeroStage
) -> None:
    schedule = make(3, 4)
    for rank in (0, 1):
        actions = lower(schedule, rank, Cut((0, 2, 4, 6)), zero, RecomputeMode.FULL).actions
        waits = [
            at for at, action in enumerate(actions) if isinstance(action, Receive) and action.op.kind is Kind.BACKWARD
        ]
        assert len(waits) == 4
        for at in waits:
            before, after = actions[at - 1], actions[at + 1]
            assert isinstance(before, Recompute)
            assert isinstance(after, Backward)
            assert before.layer == after.layer


def test_a_rank_with_several_stages_gets_the_actions_of_all() -> None:
    rows = ("F0@0 F0@2 B0@2 B0@0", "F0@1 F0@3 B0@3 B0@1")
    schedule = Schedule("loop", 4, 1, tuple(tuple(map(Op.parse, row.split())) for row in rows))
    assert text_of(schedule, 0, Cut((0, 1, 2, 3, 4), (Tie("tied", (0, 2)),)), zero=1) == (
        "F0@0.0  SEND F0@0 to 1  RECV F0@1 from 1  F0@2.2  SEND F0@2 to 1  "
        "RECV B0@3 from 1  B0@2.2  REDUCE 2  SEND B0@2 to 1  "
        "RECV B0@1 from 1  B0@0.0  REDUCE 0  REDUCE tied  STEP  GATHER 0  GATHER tied  GATHER 2"
    )
