"""Which parameters of a module come together, and whose calls need them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.parallel.blocks import Units, divide


class Tied(nn.Module):
    """Two blocks share a matrix, the rest has parameters of its own."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(4))
        self.gain = nn.Parameter(torch.ones(1))


def found(module: nn.Module, units: Units) -> dict[str, list[str]]:
    """Names of parameters by blocks, in which every parameter is once."""
    blocks = divide(module, units, lambda parameter: 0)
    names = {
        block.name: sorted({one.name for members in block.members.values() for one in members}) for block in blocks
    }
    every = [name for some in names.values() for name in some]
    assert sorted(every) == sorted(name for name, _ in module.named_parameters())
    return names


def test_a_tied_parameter_is_a_block_that_both_calls_need() -> None:
    module = Tied()
    assert found(module, (nn.Linear, nn.Embedding)) == {
        "(root)": ["gain", "scale"],
        "embedding and head": ["embedding.weight"],
        **{f"layers.{i}": [f"layers.{i}.bias", f"layers.{i}.weight"] for i in range(3)},
    }
    tied = divide(module, (nn.Linear, nn.Embedding), lambda parameter: 0)[1]
    assert tied.modules == (module.embedding, module.head)


def test_without_being_told_the_classes_that_the_module_names_are_kept_whole() -> None:
    assert found(Tied(), None) == found(Tied(), nn.Linear)


class Whole(nn.Linear):
    _no_split_modules = ("Whole",)


def test_a_module_that_names_itself_is_one_block() -> None:
    assert found(Whole(2, 2), None) == {"(root)": ["bias", "weight"]}


@pytest.mark.parametrize("bound", [1, 20, 60, 10**6])
def test_a_bound_on_size_holds_for_all_blocks_that_can_be_divided(bound: int) -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))) for _ in range(4)))
    blocks = found(module, bound)
    largest = max(sum(module.get_parameter(name).numel() for name in names) for names in blocks.values())
    assert largest <= max(bound, 20)


def test_by_default_blocks_are_an_eighth_of_the_module_at_most() -> None:
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(16)))
    assert len(found(module, None)) >= 8


CALLED: dict[str, Any] = {
    "ModuleList": lambda: nn.ModuleList([nn.Linear(2, 2)]),
    "ModuleDict": lambda: nn.ModuleDict({"a": nn.Linear(2, 2)}),
    "ParameterList": lambda: nn.ParameterList([nn.Parameter(torch.ones(2))]),
    "MultiheadAttention": lambda: nn.MultiheadAttention(4, 2),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(4, 2, 4),
    "LSTM": lambda: nn.LSTM(2, 2),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    "Sequential": lambda: nn.Sequential(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("units", [1, 10**6, lambda name, module: True], ids=["least", "most", "all"])
def test_no_block_begins_where_nobody_may_ever_call(units: Units, name: str) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = CALLED[name]()

    module = Parent()
    blocks = divide(module, units, lambda parameter: 0)
    homes = {home for block in blocks for home in block.modules}
    inside = {*module.child.modules()} - {module.child}
    if name in ("ModuleList", "ModuleDict"):
        assert homes == {module.child["a"] if name == "ModuleDict" else module.child[0]}
    elif name == "ParameterList":
        assert homes == {module}
    elif name == "Sequential":
        assert module.child[0] in homes
    else:
        assert not homes & inside


def test_kinds_of_parameters_are_told_apart_and_empty_ones_kept() -> None:
    module = nn.Module()
    module.a = nn.Parameter(torch.ones(3))
    module.b = nn.Parameter(torch.ones(2), requires_grad=False)
    module.c = nn.Parameter(torch.ones(0, 2).bfloat16())
    module.d = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    (block,) = divide(module, None, lambda parameter: 0)
    assert {str(key): [one.name for one in members] for key, members in block.members.items()} == {
        "float32": ["a"],
        "float32, frozen": ["b"],
        "bfloat16": ["c"],
        "int64, frozen": ["d"],
    }
