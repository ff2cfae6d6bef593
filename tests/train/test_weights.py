"""The weights on disk know no layout: same files, same names, same values, whoever trained them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from meshwright.comm.connect import Groups, solo
from meshwright.costs.sheet import parameters
from meshwright.costs.spec import GPTSpec
from meshwright.engine.build import build
from meshwright.layout.layout import Layout
from meshwright.train.weights import INDEX, layer_of, load_weights, save_weights
from pool import RankPool

SPEC = GPTSpec(layers=2, hidden=8, heads=4, sequence=4, vocabulary=13)


def sgd(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def save(groups: Groups, layout: Layout, folder: str, spec: GPTSpec = SPEC) -> None:
    save_weights(build(spec, layout, groups, sgd), Path(folder))


@pytest.mark.parametrize("text", ["tp4", "pp4", "dp2.tp2/zero3", "dp3/zero1", "tp2.pp2", "dp2.pp2/zero2"])
def test_every_layout_writes_the_same_bytes(pool: RankPool, tmp_path: Path, text: str) -> None:
    save(solo(), Layout(), str(tmp_path / "one"))
    layout = Layout.parse(text)
    pool.run(layout.mesh, save, layout, str(tmp_path / "many"))
    one, many = (sorted((tmp_path / run / "weights").iterdir()) for run in ("one", "many"))
    assert [file.name for file in one] == [file.name for file in many]
    for a, b in zip(one, many, strict=True):
        assert a.read_bytes() == b.read_bytes(), a.name


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_matrix_is_saved_once_and_padding_never(pool: RankPool, tmp_path: Path, tied: bool) -> None:
    spec = GPTSpec(layers=1, hidden=8, heads=4, sequence=4, vocabulary=13, tied=tied)
    layout = Layout(tensor=4)
    pool.run(layout.mesh, save, layout, str(tmp_path), spec)
    weights = load_weights(tmp_path)
    assert ("head.projection.weight" in weights) is not tied
    assert weights["embedding.token.weight"].shape == (13, 8)
    assert sum(weight.numel() for weight in weights.values()) == parameters(spec)


def test_saving_again_replaces_everything_and_leaves_nothing_beside(tmp_path: Path) -> None:
    save(solo(), Layout(), str(tmp_path))
    (tmp_path / "weights" / "stale.safetensors").write_bytes(b"old")
    save(solo(), Layout(), str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    assert not (tmp_path / "weights" / "stale.safetensors").exists()


def test_a_run_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no trained weights"):
        load_weights(tmp_path)


def test_an_index_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    save(solo(), Layout(), str(tmp_path))
    index = tmp_path / "weights" / INDEX
    content = json.loads(index.read_text())
    content["weight_map"]["embedding.token.weight"] = "../secret.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="not a plain name"):
        load_weights(tmp_path)


def test_a_parameter_belongs_to_the_layer_its_name_begins_with() -> None:
    assert layer_of("blocks.12.mlp.up.weight") == "blocks.12"
    assert layer_of("embedding.token.weight") == "embedding"
    assert layer_of("head.norm.bias") == "head"
