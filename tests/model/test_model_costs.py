"""The cost sheet against counters on the real modules, and the cut that is made from it.

FLOPs are counted by torch's FlopCounterMode on the meta device. There scaled_dot_product_attention is the two batched
matrix products it stands for, of full s x s: the sheet's convention. (On the CPU it is one fused operator that the
counter does not know and counts as nothing.)
"""

from __future__ import annotations

import pytest
import torch
from plain_gpt import CPU, build_filled, drawn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.comm.group import SoloGroup
from meshwright.costs.sheet import parameters, sheet, training_flops
from meshwright.costs.spec import GPTSpec
from meshwright.model.batch import MicroBatch
from meshwright.model.gpt import build_layer, layer_names, parameters_of
from meshwright.model.split import cut_layers
from meshwright.parallel.noise import Noise
from meshwright.schedule.cut import Tie

META = torch.device("meta")
SPECS = [GPTSpec(3, 32, 4, 16, 50, tied=tied, bias=bias) for tied in (True, False) for bias in (True, False)]


@pytest.mark.parametrize("spec", SPECS)
def test_parameters_of_the_sheet_are_those_of_the_modules(spec: GPTSpec) -> None:
    rows = sheet(spec)
    assert tuple(row.name for row in rows) == layer_names(spec)
    unique: dict[str, int] = {}
    for index, row in enumerate(rows):
        layer = build_layer(spec, index, SoloGroup("tensor"), META, torch.float32)
        entries = parameters_of(spec, index, layer)
        assert row.parameters == sum(parameter.numel() for parameter in layer.parameters())
        assert row.split_parameters == sum(entry.spec.numel for entry in entries if entry.spec.split is not None)
        unique |= {entry.name: entry.spec.numel for entry in entries}
    assert parameters(spec) == sum(unique.values())


@pytest.mark.parametrize("samples", [1, 3])
def test_flops_of_the_sheet_are_those_counted_on_the_modules(samples: int) -> None:
    spec = SPECS[0]
    tokens = torch.zeros(samples, spec.sequence, dtype=torch.int64, device=META)
    batch = MicroBatch(tokens, tokens)
    total = 0
    x = tokens
    for index, row in enumerate(sheet(spec)):
        layer = build_layer(spec, index, SoloGroup("tensor"), META, torch.float32)
        x = x.detach().requires_grad_(index > 0)
        with FlopCounterMode(display=False) as forward:
            x = layer(x, batch)
        assert forward.get_total_flops() == samples * row.flops, row.name
        with FlopCounterMode(display=False) as backward:
            x.sum().backward()
        assert backward.get_total_flops() == 2 * samples * row.flops, row.name
        total += forward.get_total_flops() + backward.get_total_flops()
    assert total == samples * training_flops(spec)


def test_attention_with_dropout_does_the_same_products() -> None:
    spec = GPTSpec(1, 32, 4, 16, 50, dropout=0.1)
    block = build_filled(spec, [1], SoloGroup("tensor"))[0][0]
    tokens = torch.zeros(2, spec.sequence, dtype=torch.int64, device=CPU)
    with FlopCounterMode(display=False) as counter:
        block(drawn(2, spec.sequence, spec.hidden), MicroBatch(tokens, tokens, Noise(1, 1, (0, 1))))
    assert counter.get_total_flops() == 2 * sheet(spec)[1].flops


def test_thirty_blocks_on_four_stages_are_all_there_once() -> None:
    spec = GPTSpec(layers=30, hidden=64, heads=4, sequence=64, vocabulary=256)
    cut = cut_layers(spec, 4)
    layers = [layer for stage in range(4) for layer in cut.layers(stage)]
    assert layers == list(range(32))
    blocks = [sum(1 <= layer <= 30 for layer in cut.layers(stage)) for stage in range(4)]
    assert sorted(blocks) == [7, 7, 8, 8]
    assert cut.ties == (Tie("tied", (0, 31)),)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_every_stage_has_a_layer(stages: int) -> None:
    cut = cut_layers(SPECS[1], stages)
    assert cut.stages == stages
    assert all(len(cut.layers(stage)) >= 1 for stage in range(stages))


def test_more_stages_than_layers_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="5 layers cannot be cut into 6 stages"):
        cut_layers(SPECS[0], 6)
