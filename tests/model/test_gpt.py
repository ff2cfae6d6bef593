"""The parallel GPT: any tensor group computes what one rank computes, and one rank what plain torch computes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from plain_gpt import CPU, PlainGPT, build_filled, drawn, drawn_tokens, drop_with, keep_all, value_of
from torch import Tensor, nn

from meshwright.comm.connect import Groups
from meshwright.comm.group import Group, Handle, Reduction, SoloGroup
from meshwright.comm.ledger import Kind, Ledger
from meshwright.costs.spec import GPTSpec
from meshwright.layout.mesh import Mesh
from meshwright.model.batch import MicroBatch
from meshwright.model.gpt import TIED, Head, build_layer, layer_names, parameters_of, ties
from meshwright.parallel.noise import Noise
from meshwright.parallel.parameter import Normal, ParameterSpec, join
from meshwright.schedule.cut import Tie
from pool import RankPool

SPEC = GPTSpec(layers=2, hidden=8, heads=4, sequence=6, vocabulary=13)
SAMPLES = 3


def assert_close(actual: Tensor, expected: Tensor, name: str = "") -> None:
    """Equal to 1e-12, relative to the largest number."""
    tolerance = 1e-12 * float(expected.detach().abs().max()) if expected.numel() else 0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance, msg=lambda text: f"{name}: {text}")


def batch_of(spec: GPTSpec, samples: int) -> MicroBatch:
    targets = drawn_tokens(spec, samples, seed=1)
    targets[:1, 2:4] = -100
    noise = Noise(seed=5, step=8, samples=tuple(range(10, 10 + samples))) if spec.dropout else None
    return MicroBatch(drawn_tokens(spec, samples), targets, noise)


@dataclass
class Passed:
    """What came out of a pass forward and back: output, the input's gradient, the gradients of this rank's shards."""

    y: Tensor
    dx: Tensor | None
    gradients: dict[str, Tensor]
    specs: dict[str, ParameterSpec]


def gradients_of(layers: list[nn.Module], spec: GPTSpec, indices: list[int]) -> dict[str, Tensor]:
    found = {}
    for index, layer in zip(indices, layers, strict=True):
        for entry in parameters_of(spec, index, layer):
            assert entry.parameter.grad is not None, entry.name
            found[entry.name] = entry.parameter.grad
    return found


def joined(ranks: list[Passed], name: str) -> Tensor:
    for rank in ranks:
        if rank.specs[name].split is None:
            assert torch.equal(rank.gradients[name], ranks[0].gradients[name]), f"replicas of {name} differ"
    return join([rank.gradients[name] for rank in ranks], ranks[0].specs[name])


# --- one block -------------------------------------------------------------------------------------------------------


def block_passed(groups: Groups, spec: GPTSpec, samples: int, recompute: bool) -> Passed:
    layers, specs = build_filled(spec, [1], groups.tensor)
    x = drawn(samples, spec.sequence, spec.hidden).requires_grad_()
    batch = batch_of(spec, samples)
    if recompute:
        with torch.no_grad():
            first = layers[0](x, batch)
    y = layers[0](x, batch)
    assert not recompute or torch.equal(first, y)
    y.backward(drawn(*y.shape, seed=1))
    if groups.tensor.size > 1 and samples and not recompute:
        tallies = [groups.ledger.total(Kind.ALL_REDUCE, "tensor", f"tensor-{way}") for way in ("forward", "backward")]
        assert [tally.calls for tally in tallies] == [2, 2]
        assert [tally.payload for tally in tallies] == [2 * x.numel() * x.element_size()] * 2
        assert groups.ledger.total().calls == 4, "four all-reduces per block, and nothing else"
    return Passed(y.detach(), x.grad, gradients_of(layers, spec, [1]), specs)


def block_on_one_rank(spec: GPTSpec, pool: RankPool) -> Passed:
    return pool.run(Mesh(), block_passed, spec, SAMPLES, False)[0]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_a_block_computes_the_same_on_any_tensor_group_with_four_all_reduces(
    pool: RankPool, size: int, bias: bool, dropout: float
) -> None:
    spec = GPTSpec(layers=2, hidden=8, heads=4, sequence=6, vocabulary=13, bias=bias, dropout=dropout)
    expected = block_on_one_rank(spec, pool)
    ranks = pool.run(Mesh(tensor=size), block_passed, spec, SAMPLES, False)
    for rank in ranks:
        assert_close(rank.y, expected.y)
        assert rank.dx is not None
        assert expected.dx is not None
        assert_close(rank.dx, expected.dx)
    for name, gradient in expected.gradients.items():
        assert_close(joined(ranks, name), gradient, name)


def test_a_recomputed_block_replays_its_dropout_to_the_last_bit(pool: RankPool) -> None:
    spec = GPTSpec(layers=2, hidden=8, heads=4, sequence=6, vocabulary=13, dropout=0.3)
    kept = pool.run(Mesh(tensor=2), block_passed, spec, SAMPLES, False)
    again = pool.run(Mesh(tensor=2), block_passed, spec, SAMPLES, True)
    for first, second in zip(kept, again, strict=True):
        assert torch.equal(first.y, second.y)
        assert first.dx is not None
        assert second.dx is not None
        assert torch.equal(first.dx, second.dx)
        assert all(torch.equal(first.gradients[name], second.gradients[name]) for name in first.gradients)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_sizes_of_micro_batches_do_not_change_what_a_sample_gets(dropout: float) -> None:
    spec = GPTSpec(layers=1, hidden=8, heads=4, sequence=6, vocabulary=13, dropout=dropout)
    block = build_filled(spec, [1], SoloGroup("tensor"))[0][0]
    x, batch = drawn(4, 6, 8), batch_of(spec, 4)
    parts = []
    for piece in (slice(0, 1), slice(1, 1), slice(1, 4)):
        noise = None if batch.noise is None else Noise(5, 8, batch.noise.samples[piece])
        parts.append(block(x[piece], MicroBatch(batch.tokens[piece], batch.targets[piece], noise)))
    assert_close(torch.cat(parts), block(x, batch))


# --- the whole model -------------------------------------------------------------------------------------------------


def model_passed(groups: Groups, spec: GPTSpec, samples: int) -> Passed:
    indices = list(range(spec.layers + 2))
    layers, specs = build_filled(spec, indices, groups.tensor)
    batch = batch_of(spec, samples)
    x = batch.tokens
    for layer in layers:
        x = layer(x, batch)
    x.backward()
    return Passed(x.detach(), None, gradients_of(layers, spec, indices), specs)


SPECS = [
    GPTSpec(2, 8, 4, 6, 13, tied=True, bias=True),
    GPTSpec(2, 8, 4, 6, 13, tied=False, bias=True),
    GPTSpec(2, 8, 4, 6, 13, tied=True, bias=False),
    GPTSpec(2, 8, 4, 6, 13, tied=False, bias=False),
    GPTSpec(2, 8, 4, 6, 13, tied=True, bias=True, dropout=0.2),
]


def name_of(spec: GPTSpec) -> str:
    return f"{'tied' if spec.tied else 'untied'}-{'bias' if spec.bias else 'unbiased'}-{spec.dropout}"


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_whole_model_equals_one_written_in_plain_torch(pool: RankPool, size: int, spec: GPTSpec) -> None:
    ranks = pool.run(Mesh(tensor=size), model_passed, spec, SAMPLES)
    plain, batch = PlainGPT(spec), batch_of(spec, SAMPLES)
    plain.load({name: value_of(name, described) for name, described in ranks[0].specs.items()})
    drop = keep_all if batch.noise is None else drop_with(batch.noise, spec.dropout)
    expected = plain.loss_sum(batch.tokens, batch.targets, drop)
    expected.backward()
    parameters = dict(plain.named_parameters())
    assert parameters.keys() == ranks[0].gradients.keys()
    for rank in ranks:
        assert_close(rank.y, expected)
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        whole = joined(ranks, name)
        assert whole.shape == parameter.shape, "padding never shows"
        assert_close(whole, parameter.grad, name)
        padding = [rank.gradients[name][13 - 7 :] for rank in ranks[1:] if size == 2 and name == TIED]
        assert not any(rows.any() for rows in padding)


@pytest.mark.parametrize("size", [1, 2])
def test_an_empty_micro_batch_has_no_loss_and_zero_gradients(pool: RankPool, size: int) -> None:
    for spec in (SPECS[0], SPECS[4]):
        for rank in pool.run(Mesh(tensor=size), model_passed, spec, 0):
            assert rank.y.item() == 0.0
            assert rank.gradients
            assert not any(gradient.any() for gradient in rank.gradients.values())


def logits_on_rank(groups: Groups, spec: GPTSpec, length: int) -> Tensor:
    layers, _ = build_filled(spec, range(spec.layers + 2), groups.tensor)
    head = layers[-1]
    assert isinstance(head, Head)
    batch = batch_of(spec, 2)
    x = batch.tokens[:, :length]
    for layer in layers[:-1]:
        x = layer(x, batch)
    return head.logits(x)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gathered_logits_equal_the_plain_ones_without_padding(pool: RankPool, size: int) -> None:
    spec, length = SPECS[0], 4
    plain = PlainGPT(spec)
    _, specs = build_filled(spec, range(spec.layers + 2), SoloGroup("tensor"))
    plain.load({name: value_of(name, described) for name, described in specs.items()})
    expected = plain.logits(batch_of(spec, 2).tokens[:, :length])
    for logits in pool.run(Mesh(tensor=size), logits_on_rank, spec, length):
        assert logits.shape == (2, length, 13)
        assert not logits.requires_grad
        assert_close(logits, expected.detach())


# --- names, initial values, errors -----------------------------------------------------------------------------------


def entries(spec: GPTSpec) -> dict[str, ParameterSpec]:
    layers = [build_layer(spec, index, SoloGroup("tensor"), CPU, torch.float64) for index in range(spec.layers + 2)]
    return {entry.name: entry.spec for index, layer in enumerate(layers) for entry in parameters_of(spec, index, layer)}


def test_layers_and_parameters_have_the_names_of_the_whole_model() -> None:
    assert layer_names(SPEC) == ("embedding", "blocks.0", "blocks.1", "head")
    assert [name for name in entries(SPEC) if not name.startswith("blocks.0.")] == [
        "embedding.token.weight",
        "embedding.position.weight",
        "blocks.1.norm1.weight",
        "blocks.1.norm1.bias",
        "blocks.1.attention.qkv.weight",
        "blocks.1.attention.qkv.bias",
        "blocks.1.attention.output.weight",
        "blocks.1.attention.output.bias",
        "blocks.1.norm2.weight",
        "blocks.1.norm2.bias",
        "blocks.1.mlp.up.weight",
        "blocks.1.mlp.up.bias",
        "blocks.1.mlp.down.weight",
        "blocks.1.mlp.down.bias",
        "head.norm.weight",
        "head.norm.bias",
    ]


def test_a_tied_projection_is_the_token_embedding_and_described_alike() -> None:
    untied = entries(GPTSpec(2, 8, 4, 6, 13, tied=False))
    assert untied["head.projection.weight"] == untied[TIED]
    assert ties(SPEC) == (Tie("tied", (0, 3)),)
    assert ties(GPTSpec(tied=False)) == ()


def test_initial_values_and_decay_are_those_of_gpt2() -> None:
    specs = entries(SPEC)
    for name, spec in specs.items():
        matrix = len(spec.shape) == 2
        assert spec.decay is matrix, name
        assert isinstance(spec.init, Normal) is matrix, name
    assert specs["blocks.0.attention.qkv.weight"].init == Normal(0.02)
    assert specs["blocks.0.mlp.up.weight"].init == Normal(0.02)
    assert specs["blocks.0.attention.output.weight"].init == Normal(0.01), "0.02 / sqrt(2 L) with L = 2"
    assert specs["blocks.0.mlp.down.weight"].init == Normal(0.01)


class PaperGroup(Group):
    """A tensor group of which only the size matters: for shapes on the meta device."""

    def __init__(self, size: int) -> None:
        super().__init__("tensor", tuple(range(size)), 0, Ledger())

    def start_all_reduce(self, tensor: Tensor, *, label: str, reduction: Reduction = Reduction.SUM) -> Handle:
        raise NotImplementedError

    start_reduce_scatter = start_all_gather = start_all_to_all = start_all_reduce  # type: ignore[assignment]
    start_broadcast = barrier = start_all_reduce  # type: ignore[assignment]


def test_heads_that_tp_does_not_divide_are_refused_with_the_nearest_tp() -> None:
    with pytest.raises(ValueError, match="tp=3 does not divide 4 heads; try 2 or 4"):
        build_layer(SPEC, 1, PaperGroup(3), torch.device("meta"), torch.float32)


def test_too_many_tokens_are_refused_with_both_numbers() -> None:
    layer = build_filled(SPEC, [0], SoloGroup("tensor"))[0][0]
    tokens = torch.zeros(1, 7, dtype=torch.int64)
    with pytest.raises(ValueError, match="7 tokens in a sequence, but the model has 6 positions"):
        layer(tokens, MicroBatch(tokens, tokens))
