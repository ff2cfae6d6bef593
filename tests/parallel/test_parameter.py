"""A parameter's description: cutting, joining, padding, initial values, names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from meshwright.comm.connect import Groups
from meshwright.layout.mesh import Mesh
from meshwright.parallel.parameter import (
    Constant,
    Described,
    Normal,
    ParameterSpec,
    Split,
    cut,
    described,
    initial_value,
    join,
)
from pool import RankPool

CPU = torch.device("cpu")


def numbered(spec: ParameterSpec) -> Tensor:
    return torch.arange(1, spec.numel + 1, dtype=torch.float64).view(spec.shape)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.data())
def test_joining_the_shards_gives_the_whole_for_any_shape_and_size(shape: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 8))
    split = data.draw(st.none() | st.builds(Split, st.integers(0, len(shape) - 1)))
    spec = ParameterSpec(tuple(shape), Constant(0), split)
    whole = numbered(spec)
    shards = [cut(whole, spec, index, size) for index in range(size)]
    assert {tuple(shard.shape) for shard in shards} == {spec.local_shape(size)}
    assert torch.equal(join(shards, spec), whole)
    if split is not None:
        assert sum(shard.sum() for shard in shards) == whole.sum(), "what pads is zero, and nothing is cut twice"


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 1))
def test_blocks_are_cut_one_by_one_and_joined_again(blocks: int, size: int, extent: int, dim: int) -> None:
    shape = [2, 2]
    shape[dim] = blocks * size * extent
    spec = ParameterSpec(tuple(shape), Constant(0), Split(dim, blocks))
    whole = numbered(spec)
    shards = [cut(whole, spec, index, size) for index in range(size)]
    assert {tuple(shard.shape) for shard in shards} == {spec.local_shape(size)}
    assert torch.equal(join(shards, spec), whole)


def test_a_fused_qkv_gives_each_rank_the_rows_of_its_own_heads() -> None:
    spec = ParameterSpec((12,), Constant(0), Split(0, blocks=3))
    q, k, v = torch.arange(0, 4), torch.arange(10, 14), torch.arange(20, 24)
    whole = torch.cat([q, k, v])
    assert cut(whole, spec, 0, 2).tolist() == [0, 1, 10, 11, 20, 21]
    assert cut(whole, spec, 1, 2).tolist() == [2, 3, 12, 13, 22, 23]


@pytest.mark.parametrize(
    ("vocabulary", "size", "local"), [(13, 2, 7), (13, 4, 4), (5, 4, 2), (50257, 2, 25129), (50257, 4, 12565)]
)
def test_a_vocabulary_that_tp_does_not_divide_is_padded_with_zeros_that_join_drops(
    vocabulary: int, size: int, local: int
) -> None:
    spec = ParameterSpec((vocabulary, 2), Normal(1.0), Split(0))
    whole = numbered(spec)
    shards = [cut(whole, spec, index, size) for index in range(size)]
    assert spec.local_shape(size) == (local, 2)
    rows = torch.cat(shards)
    assert rows.shape[0] == local * size > vocabulary
    assert not rows[vocabulary:].any()
    rows[vocabulary:] = torch.nan
    assert torch.equal(join(rows.split(local), spec), whole)


def test_a_shard_in_one_piece_is_not_copied() -> None:
    spec = ParameterSpec((8, 2), Constant(0), Split(0))
    whole = numbered(spec)
    assert cut(whole, spec, 1, 2).data_ptr() == whole[4:].data_ptr()


def test_blocks_that_tp_does_not_divide_are_refused_with_the_nearest_tp() -> None:
    spec = ParameterSpec((24, 8), Normal(1.0), Split(0, blocks=3))
    with pytest.raises(ValueError, match=r"tp=3 does not divide dim 0 of \(24, 8\), 3 blocks of 8; try 2 or 4"):
        spec.local_shape(3)


def test_an_initial_value_depends_on_seed_and_name_only() -> None:
    spec = ParameterSpec((64, 64), Normal(0.02), Split(0))
    value = initial_value(spec, "blocks.0.mlp.up.weight", seed=1)
    torch.manual_seed(99)
    assert torch.equal(value, initial_value(spec, "blocks.0.mlp.up.weight", seed=1))
    assert not torch.equal(value, initial_value(spec, "blocks.1.mlp.up.weight", seed=1))
    assert not torch.equal(value, initial_value(spec, "blocks.0.mlp.up.weight", seed=2))
    assert value.dtype == torch.float32
    assert value.std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(value.mean().item()) < 0.001
    assert initial_value(ParameterSpec((3,), Constant(1.0)), "norm.weight", 1).tolist() == [1, 1, 1]


QKV = ParameterSpec((24, 8), Normal(0.02), Split(0, blocks=3))
OUTPUT = ParameterSpec((8, 8), Normal(0.02), Split(1))
TOKEN = ParameterSpec((13, 8), Normal(0.02), Split(0))


def initialised(groups: Groups) -> list[Tensor]:
    tensor = groups.tensor
    return [
        cut(initial_value(spec, name, seed=7), spec, tensor.index, tensor.size).clone()
        for name, spec in (("qkv", QKV), ("output", OUTPUT), ("token", TOKEN))
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_initial_shards_differ_and_together_are_the_single_process_value(pool: RankPool, size: int) -> None:
    by_rank = pool.run(Mesh(tensor=size), initialised)
    for place, (name, spec) in enumerate((("qkv", QKV), ("output", OUTPUT), ("token", TOKEN))):
        shards = [values[place] for values in by_rank]
        for index, shard in enumerate(shards):
            assert all(not torch.equal(shard, other) for other in shards[:index])
        assert torch.equal(join(shards, spec), initial_value(spec, name, seed=7))


def test_data_parallel_replicas_are_initialised_alike(pool: RankPool) -> None:
    first, second = pool.run(Mesh(data=2), initialised)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


class Pair(Described):
    def __init__(self, group_size: int, device: torch.device) -> None:
        super().__init__()
        self.declare("weight", ParameterSpec((6, 2), Normal(1.0), Split(0)), group_size, device, torch.float64)
        self.declare("bias", ParameterSpec((2,), Constant(0.0), decay=False), group_size, device, torch.float64)


def test_parameters_are_listed_under_global_names_in_the_order_of_declaration() -> None:
    module = nn.ModuleDict({"one": Pair(2, CPU), "two": Pair(2, CPU)})
    entries = list(described(module, "blocks.3"))
    assert [entry.name for entry in entries] == [
        "blocks.3.one.weight",
        "blocks.3.one.bias",
        "blocks.3.two.weight",
        "blocks.3.two.bias",
    ]
    assert [tuple(entry.parameter.shape) for entry in entries] == [(3, 2), (2,)] * 2
    other = nn.Parameter(torch.ones(3, 2))
    entries[2].owner.register_parameter(entries[2].attribute, other)
    assert entries[2].parameter is other
    assert [entry.name for entry in described(module, "blocks.3")] == [entry.name for entry in entries]


def test_a_parameter_that_nobody_described_is_noticed() -> None:
    with pytest.raises(AssertionError, match=r"head\.0 holds \['weight', 'bias'\] but describes \[\]"):
        list(described(nn.Sequential(nn.Linear(2, 2)), "head"))


def test_parameters_can_be_declared_on_the_meta_device() -> None:
    pair = Pair(2, torch.device("meta"))
    assert pair.weight.is_meta
    assert pair.weight.shape == (3, 2)
