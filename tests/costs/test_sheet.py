"""The cost sheet, held against the formulas and table 1 of Narayanan et al., 2021."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.costs.sheet import parameters, sheet, training_flops
from meshwright.costs.spec import GPTSpec

TABLE_1 = Path(__file__).parent.parent / "published" / "megatron2021_table1_weak_scaling.csv"
SMALL = GPTSpec(layers=2, hidden=8, heads=2, sequence=5, vocabulary=13)


def _rows() -> list[dict[str, str]]:
    with TABLE_1.open() as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def _spec(row: dict[str, str]) -> GPTSpec:
    sizes = {name: int(row[name]) for name in ("layers", "hidden", "heads")}
    return GPTSpec(**sizes, sequence=2048, vocabulary=51200)


@pytest.mark.parametrize("row", _rows(), ids=lambda row: f"{row['params_B']}B")
def test_parameters_are_those_of_the_megatron_paper(row: dict[str, str]) -> None:
    spec = _spec(row)
    h, layers = spec.hidden, spec.layers
    # Equation 2 of the paper, 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)), leaves out the last norm: 2 h.
    formula = 12 * layers * h * h + 13 * layers * h + (spec.vocabulary + spec.sequence) * h
    assert parameters(spec) == formula + 2 * h
    assert parameters(spec) / 1e9 == pytest.approx(float(row["params_B"]), abs=0.06)


@pytest.mark.parametrize("row", _rows(), ids=lambda row: f"{row['params_B']}B")
def test_flops_are_those_of_the_megatron_paper(row: dict[str, str]) -> None:
    spec, batch = _spec(row), int(row["global_batch"])
    s, h, layers = spec.sequence, spec.hidden, spec.layers
    # The paper recomputes every block: 96 B s l h^2 (1 + s/(6 h) + V/(16 l h)).
    formula = 96 * s * layers * h * h + 16 * s * s * layers * h + 6 * s * spec.vocabulary * h
    blocks = sum(layer.flops for layer in sheet(spec) if layer.name.startswith("blocks"))
    assert training_flops(spec) + blocks == formula
    seconds = batch * formula / (int(row["gpus"]) * float(row["tflops_per_gpu"]) * 1e12)
    assert seconds == pytest.approx(float(row["iter_s_derived"]), rel=1e-3)


def test_the_sheet_has_a_row_per_layer_in_order() -> None:
    assert [row.name for row in sheet(SMALL)] == ["embedding", "blocks.0", "blocks.1", "head"]


def test_the_rows_count_what_can_be_counted_by_hand() -> None:
    embedding, block, _, head = sheet(SMALL)
    assert (embedding.parameters, embedding.split_parameters, embedding.flops) == (13 * 8 + 5 * 8, 13 * 8, 0)
    assert block.parameters == 16 + (192 + 24) + (64 + 8) + 16 + (256 + 32) + (256 + 8)
    assert block.split_parameters == (192 + 24) + 64 + (256 + 32) + 256
    assert block.flops == 2 * 5 * (192 + 64 + 256 + 256) + 2 * (2 * 5 * 5 * 8)
    assert (head.parameters, head.split_parameters, head.flops) == (16 + 13 * 8, 13 * 8, 2 * 5 * 8 * 13)


def test_without_biases_only_matrices_and_norm_weights_are_left() -> None:
    block = sheet(replace(SMALL, bias=False))[1]
    assert block.parameters == 8 + 192 + 64 + 8 + 256 + 256
    assert block.split_parameters == 192 + 64 + 256 + 256


def test_a_tied_projection_stands_in_its_row_and_counts_once_in_the_whole() -> None:
    untied = replace(SMALL, tied=False)
    assert sheet(untied) == sheet(SMALL)
    assert parameters(untied) - parameters(SMALL) == 13 * 8
    assert parameters(untied) == sum(row.parameters for row in sheet(untied))
