"""ZeRO units: what each stage holds, the transitions, odd sizes, and what the optimizer owns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.comm.connect import Groups, solo
from meshwright.comm.group import SoloGroup
from meshwright.layout.layout import Layout
from meshwright.layout.mesh import Mesh
from meshwright.layout.zero import ZeroStage, row
from meshwright.parallel.flat import Run
from meshwright.parallel.parameter import (
    Constant,
    Described,
    DescribedParameter,
    Normal,
    ParameterSpec,
    described,
    initial_value,
)
from meshwright.parallel.pool import GradientPool
from meshwright.parallel.precision import Precision
from meshwright.parallel.setting import Setting
from meshwright.parallel.unit import State, Unit
from pool import RankPool

CPU = torch.device("cpu")


class Odd(Described):
    """Parameters of sizes that two ranks do not divide: 7 and 5, and one of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.declare("seven", ParameterSpec((7, 1), Normal(1.0)), 1, CPU, torch.float64)
        self.declare("five", ParameterSpec((5,), Constant(2.0), decay=False), 1, CPU, torch.float64)
        self.declare("none", ParameterSpec((0,), Constant(2.0), decay=False), 1, CPU, torch.float64)


def make(groups: Groups, stage: ZeroStage) -> tuple[Odd, Unit]:
    module = Odd()
    parameters: list[DescribedParameter] = list(described(module, "odd"))
    setting = replace(
        Setting.of(Layout(data=groups.data.size), groups, Precision.of(torch.float64)), sharding=row(stage)
    )
    unit = Unit("0", parameters, setting, GradientPool(groups.data, 20, CPU))
    for slot in unit.slots:
        unit.load(slot.name, initial_value(slot.spec, slot.name, 0))
    unit.rest()
    return module, unit


def cycle(groups: Groups, stage: ZeroStage) -> None:
    """Gather, differentiate, reduce, step by hand: every parameter ends where plain arithmetic says."""
    module, unit = make(groups, stage)
    before = {name: initial_value(spec, f"odd.{name}", 0).double() for name, spec in module.specs.items()}
    if stage is ZeroStage.PARAMETERS:
        unit.start_gather()
        unit.whole()
    for name, value in before.items():
        assert torch.equal(getattr(module, name), value)
    unit.open_gradient()
    (module.seven.sum() * (1 + groups.rank) + (module.five**2).sum()).backward()
    unit.gradient.start_reduce()
    unit.finish_reduce()
    for run in unit.runs():
        unit.master[run.part].sub_(unit.gradient.owned[run.part])
        unit.publish(run.part)
    if stage is ZeroStage.PARAMETERS:
        unit.release()
    unit.stepped()
    if unit.state is State.SHARDED:
        unit.start_gather()
    unit.whole()
    assert torch.equal(module.seven, before["seven"] - sum(1 + rank for rank in range(groups.mesh.size)))
    assert torch.equal(module.five, before["five"] - groups.mesh.size * 2 * before["five"])


@pytest.mark.parametrize("stage", ZeroStage)
@pytest.mark.parametrize("data", [1, 2, 3])
def test_parameters_of_odd_sizes_do_not_touch_their_neighbours(pool: RankPool, stage: ZeroStage, data: int) -> None:
    pool.run(Mesh(data=data), cycle, stage)


def held(groups: Groups, stage: ZeroStage) -> tuple[int, int, int]:
    _, unit = make(groups, stage)
    owned = sum(run.stop - run.start for run in unit.runs())
    return (*unit.state_bytes, owned)


def test_each_stage_holds_what_the_table_says(gloo_pool: RankPool) -> None:
    whole, shard = 12 * 8, 6 * 8
    expected = {0: (whole, whole, 12), 1: (whole, whole, 6), 2: (whole, shard, 6), 3: (shard, shard, 6)}
    for stage, bytes_held in expected.items():
        assert gloo_pool.run(Mesh(data=2), held, ZeroStage(stage)) == [bytes_held] * 2


def test_a_shard_of_padding_only_owns_nothing(pool: RankPool) -> None:
    # 12 elements over 5 ranks are shards of 3: the last is padding.
    assert [owned for _, _, owned in pool.run(Mesh(data=5), held, ZeroStage.OPTIMIZER)] == [3, 3, 3, 3, 0]


def test_wrong_transitions_name_the_unit_and_its_parameters() -> None:
    _, unit = make(solo(), ZeroStage.PARAMETERS)
    unit.start_gather()
    unit.whole()
    with pytest.raises(RuntimeError, match=r"cannot gather unit 0 \(odd.seven, odd.five, odd.none\): it is whole"):
        unit.start_gather()
    unit.release()
    with pytest.raises(RuntimeError, match=r"cannot use unit 0 .* it is sharded, not whole"):
        unit.whole()
    with pytest.raises(RuntimeError, match=r"cannot release unit 0"):
        unit.release()


def test_decayed_and_undecayed_parameters_are_two_runs_without_the_padding() -> None:
    _, unit = make(solo(), ZeroStage.NONE)
    assert unit.runs() == (Run(0, 7, group=0), Run(7, 12, group=1))


def test_released_memory_is_given_back_and_gathering_does_not_disturb_autograd() -> None:
    module, unit = make(solo(), ZeroStage.PARAMETERS)
    unit.start_gather()
    unit.whole()
    x = torch.ones(7, 1, dtype=torch.float64, requires_grad=True)
    loss = (x * module.seven).sum()
    unit.release()
    assert unit._whole.held_bytes == 0
    unit.start_gather()
    unit.whole()
    unit.open_gradient()
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, module.seven)


def test_a_unit_without_parameters_is_harmless() -> None:
    data = SoloGroup("data")
    setting = Setting.of(Layout(), solo(), Precision.of(torch.float32))
    unit = Unit("0", [], setting, GradientPool(data, 0, CPU))
    assert unit.runs() == ()
    assert list(unit.unique_gradients()) == []
