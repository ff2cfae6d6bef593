"""What is known of every parameter comes back exactly: over other numbers of ranks, other stages, from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from any_module import Layer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from meshwright import Parallel, parallelize
from meshwright.comm.connect import Groups
from meshwright.engine.states import ParameterState
from meshwright.layout.layout import Layout
from pool import RankPool


class Adapted(nn.Module):
    """Frozen layers, trained ones, small ones of which most ranks' shards are padding, one that is seldom used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.frozen = Layer(7).requires_grad_(False)
        self.small = nn.ParameterDict({"gain": nn.Parameter(torch.ones(1)), "shift": nn.Parameter(torch.zeros(2))})
        self.partly = Layer(7)
        self.partly.up.requires_grad_(False)
        self.seldom = nn.Linear(7, 3)
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor, seldom: bool) -> Tensor:
        x = self.partly(self.frozen(self.first(x))) * self.small["gain"]
        y: Tensor = (self.seldom(x) if seldom else self.last(x)).add(self.small["shift"].sum())
        return y


def loss(model: Any, sample: tuple[Tensor, bool]) -> Tensor:
    y: Tensor = model(sample[0], seldom=sample[1]).square().mean()
    return y


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
}


def make(optimizer: str, layout: Layout, groups: Groups | None, dtype: torch.dtype | None = None) -> Parallel:
    torch.manual_seed(groups.rank if groups else 0)
    module = Adapted().double()
    kind, options = OPTIMIZERS[optimizer]

    def factory(parameters: Any) -> torch.optim.Optimizer:
        return kind(parameters, **options)

    # Only one of two groups has momentum.
    own = [{"params": module.last.parameters(), "lr": 1e-3, **({"momentum": 0.0} if optimizer == "momentum" else {})}]
    rest = [p for name, p in module.named_parameters() if not name.startswith("last")]
    return parallelize(
        module,
        layout,
        optimizer=factory,
        loss=loss,
        groups=groups,
        units=(nn.Linear, Layer),
        parameter_groups=[*own, {"params": rest}],
        dtype=dtype,
    )


def take(model: Parallel, step: int) -> float:
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    part = x[model.groups.data.index :: model.groups.data.size]
    return model.step([(part, step == 4)]).loss


def write(file: Path, model: Parallel, first: bool) -> None:
    tensors = {}
    for state in model.states():
        tensors[f"{state.name}/"] = state.value.contiguous()
        tensors |= {f"{state.name}/{key}": known.contiguous() for key, known in state.remembered.items()}
    if first:
        save_file(tensors, file)


def read(file: Path) -> dict[str, ParameterState]:
    found: dict[str, dict[str, Tensor]] = {}
    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - it is not a dict
            parameter, _, key = name.rpartition("/")
            found.setdefault(parameter, {})[key] = tensors.get_tensor(name)
    return {name: ParameterState(name, states.pop(""), states) for name, states in found.items()}


def saved(groups: Groups, layout: Layout, optimizer: str, file: Path) -> list[float]:
    model = make(optimizer, layout, groups)
    before = {state.name: state for state in model.states()}
    for step in range(3):
        take(model, step)
    for state in model.states():
        frozen = state.name.startswith(("frozen", "partly.up"))
        assert (
            frozen == torch.equal(state.value, before[state.name].value)
            or state.value.numel() == 0
            or (state.name.startswith("seldom"))
        )
        if frozen or (state.name.startswith("seldom") and optimizer != "adagrad"):
            assert not state.remembered, state.name
    write(file, model, groups.rank == 0)
    return [take(model, step) for step in range(3, 7)]


def resumed(groups: Groups | None, layout: Layout, optimizer: str, file: Path) -> list[float]:
    model = make(optimizer, layout, groups)
    take(model, 9)  # what it knows by then is forgotten
    states = read(file)
    model.load_states(states)
    for state in model.states():
        assert torch.equal(state.value, states[state.name].value), state.name
        assert state.remembered.keys() == states[state.name].remembered.keys(), state.name
        for key, known in state.remembered.items():
            assert torch.equal(known, states[state.name].remembered[key]), f"{state.name} {key}"
    return [take(model, step) for step in range(3, 7)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("text", ["dp2/zero3", pytest.param("dp2/zero1", marks=pytest.mark.slow)])
def test_a_run_goes_on_over_any_number_of_ranks_and_any_stage(
    gloo_pool: RankPool, tmp_path: Path, text: str, optimizer: str
) -> None:
    layout, file = Layout.parse(text), tmp_path / "states.safetensors"
    unbroken, *_ = gloo_pool.run(layout.mesh, saved, layout, optimizer, file)
    assert resumed(None, Layout(), optimizer, file) == pytest.approx(unbroken, rel=1e-10)
    others = ["dp3/zero2", "dp4/zero3", "dp2/zero0"] if text == "dp2/zero3" else ["dp3/zero3", "dp4/zero3/shard2"]
    for other in others:
        goes_on = Layout.parse(other)
        for losses in gloo_pool.run(goes_on.mesh, resumed, goes_on, optimizer, file):
            assert losses == pytest.approx(unbroken, rel=1e-10), other


@pytest.mark.parametrize("text", ["dp3/zero2", "dp4/zero3"])
def test_a_run_goes_on_where_ranks_share_memory(pool: RankPool, tmp_path: Path, text: str) -> None:
    layout, file = Layout.parse(text), tmp_path / "states.safetensors"
    unbroken, *_ = pool.run(layout.mesh, saved, layout, "amsgrad", file)
    for losses in pool.run(layout.mesh, resumed, layout, "amsgrad", file):
        assert losses == pytest.approx(unbroken, rel=1e-10)


def test_states_that_do_not_fit_are_refused_and_nothing_is_changed() -> None:
    model = make("amsgrad", Layout(), None)
    take(model, 0)
    states = {state.name: state for state in model.states()}
    other = make("momentum", Layout(), None)
    take(other, 0)
    wrong = dict(states) | {"first.bias": ParameterState("first.bias", torch.zeros(8), {})}
    changed = {name: ParameterState(name, state.value + 1, state.remembered) for name, state in states.items()}
    missing = {name: state for name, state in changed.items() if name != "last.bias"}
    foreign = changed | {"last.bias": next(state for state in other.states() if state.name == "first.bias")}
    for given, message in [
        (missing, r"1 are missing \(last.bias"),
        (changed | {"other": states["last.bias"]}, r"1 are unknown \(other"),
        (wrong, r"first.bias has the shape \(7,\), not \(8,\)"),
        (foreign | {"last.bias": ParameterState("last.bias", states["last.bias"].value + 1, {"x": torch.zeros(3)})},
         "last.bias comes with x, but this optimizer remembers exp_avg"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            model.load_states(given)
        for state in model.states():
            old = states[state.name]
            assert torch.equal(state.value, old.value)
            assert all(torch.equal(known, old.remembered[key]) for key, known in state.remembered.items())
