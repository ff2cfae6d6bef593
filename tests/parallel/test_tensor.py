"""Tensor-parallel layers and loss, in float64, against the plain ones of torch on one process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.comm.connect import Groups
from meshwright.comm.group import SoloGroup
from meshwright.comm.ledger import Kind
from meshwright.layout.mesh import Mesh
from meshwright.parallel.parameter import Described, Normal, ParameterSpec, Split, cut, join
from meshwright.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyEmbedding,
    vocabulary_cross_entropy,
)
from pool import RankPool

CPU = torch.device("cpu")
DOUBLE = torch.float64
SOLO = SoloGroup("tensor")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    """Equal to `tolerance`, relative to the largest number."""
    largest = float(expected.detach().abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(1e-3, largest))


def fill(layer: Described, values: dict[str, Tensor], index: int, size: int) -> None:
    for name, spec in layer.specs.items():
        layer.register_parameter(name, nn.Parameter(cut(values[name], spec, index, size).clone()))


def gradients(layer: Described) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}


# --- linear layers ---------------------------------------------------------------------------------------------------

UP = {"weight": drawn(16, 6, seed=1), "bias": drawn(16, seed=2)}
DOWN = {"weight": drawn(6, 16, seed=3), "bias": drawn(6, seed=4)}


@dataclass
class Linears:
    """What two linear layers in a row made of an input."""

    y: Tensor
    dx: Tensor
    up: dict[str, Tensor]
    down: dict[str, Tensor]


def two_linears(groups: Groups, samples: int, bias: bool) -> Linears:
    tensor = groups.tensor
    up = ColumnParallelLinear((6, 16), Normal(1.0), bias, tensor, CPU, DOUBLE)
    down = RowParallelLinear((16, 6), Normal(1.0), bias, tensor, CPU, DOUBLE)
    fill(up, UP, tensor.index, tensor.size)
    fill(down, DOWN, tensor.index, tensor.size)
    x = drawn(samples, 3, 6, seed=5).requires_grad_()
    y = down(up(x).tanh())
    y.backward(drawn(samples, 3, 6, seed=6))
    expected = int(samples > 0 and tensor.size > 1)
    assert groups.ledger.total(Kind.ALL_REDUCE, label="tensor-forward").calls == expected
    assert groups.ledger.total(Kind.ALL_REDUCE, label="tensor-backward").calls == expected
    assert x.grad is not None
    return Linears(y.detach(), x.grad, gradients(up), gradients(down))


def plain_linears(samples: int, bias: bool) -> Linears:
    up, down = nn.Linear(6, 16, bias, dtype=DOUBLE), nn.Linear(16, 6, bias, dtype=DOUBLE)
    up.load_state_dict({name: UP[name] for name in up.state_dict()})
    down.load_state_dict({name: DOWN[name] for name in down.state_dict()})
    x = drawn(samples, 3, 6, seed=5).requires_grad_()
    y = down(up(x).tanh())
    y.backward(drawn(samples, 3, 6, seed=6))
    assert x.grad is not None
    of = [{name: p.grad for name, p in layer.named_parameters() if p.grad is not None} for layer in (up, down)]
    return Linears(y.detach(), x.grad, of[0], of[1])


@pytest.mark.parametrize("samples", [2, 0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_then_row_equals_two_plain_linear_layers(pool: RankPool, size: int, bias: bool, samples: int) -> None:
    expected = plain_linears(samples, bias)
    ranks = pool.run(Mesh(tensor=size), two_linears, samples, bias)
    split = {
        "up weight": ParameterSpec((16, 6), Normal(1.0), Split(0)),
        "up bias": ParameterSpec((16,), Normal(1.0), Split(0)),
        "down weight": ParameterSpec((6, 16), Normal(1.0), Split(1)),
    }
    for rank in ranks:
        # A bias added on every rank before the sum would be there `size` times.
        torch.testing.assert_close(rank.y, expected.y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(rank.dx, expected.dx, rtol=1e-12, atol=1e-12)
        assert torch.equal(rank.y, ranks[0].y), "replicas are equal to the last bit"
        if bias:
            torch.testing.assert_close(rank.down["bias"], expected.down["bias"], rtol=1e-12, atol=1e-12)
    for name, gradient in expected.up.items():
        whole = join([rank.up[name] for rank in ranks], split[f"up {name}"])
        torch.testing.assert_close(whole, gradient, rtol=1e-12, atol=1e-12)
    whole = join([rank.down["weight"] for rank in ranks], split["down weight"])
    torch.testing.assert_close(whole, expected.down["weight"], rtol=1e-12, atol=1e-12)


def test_a_column_parallel_layer_passes_gradcheck_and_skips_what_needs_no_gradient() -> None:
    layer = ColumnParallelLinear((3, 4), Normal(1.0), True, SOLO, CPU, DOUBLE)
    fill(layer, {"weight": drawn(4, 3), "bias": drawn(4)}, 0, 1)
    x = drawn(2, 5, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, layer.weight, layer.bias))
    layer.weight.requires_grad_(False)
    layer(x.detach()).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias is not None
    assert layer.bias.grad is not None


# --- embedding -------------------------------------------------------------------------------------------------------


def tokens_of(vocabulary: int) -> Tensor:
    tokens = torch.randint(vocabulary, (3, 7), generator=torch.Generator().manual_seed(1))
    tokens[0, :2] = torch.tensor([0, vocabulary - 1])
    return tokens


def embedded(groups: Groups, vocabulary: int, samples: int) -> tuple[Tensor, Tensor]:
    tensor = groups.tensor
    layer = VocabularyEmbedding(vocabulary, 4, Normal(1.0), tensor, CPU, DOUBLE)
    fill(layer, {"weight": drawn(vocabulary, 4)}, tensor.index, tensor.size)
    y = layer(tokens_of(vocabulary)[:samples])
    y.backward(drawn(samples, 7, 4, seed=1))
    assert layer.weight.grad is not None
    return y.detach(), layer.weight.grad


@pytest.mark.parametrize("vocabulary", [13, 50257])
@pytest.mark.parametrize("size", [2, 4])
def test_an_embedding_cut_over_the_vocabulary_equals_the_whole_one(pool: RankPool, size: int, vocabulary: int) -> None:
    weight = drawn(vocabulary, 4).requires_grad_()
    expected = F.embedding(tokens_of(vocabulary), weight)
    expected.backward(drawn(3, 7, 4, seed=1))
    ranks = pool.run(Mesh(tensor=size), embedded, vocabulary, 3)
    assert all(torch.equal(y, expected) for y, _ in ranks)
    rows = torch.cat([gradient for _, gradient in ranks])
    assert not rows[vocabulary:].any(), "padded rows have no gradient at all"
    spec = ParameterSpec((vocabulary, 4), Normal(1.0), Split(0))
    assert_close(join([gradient for _, gradient in ranks], spec), weight.grad)  # type: ignore[arg-type]


def test_an_empty_batch_can_be_embedded(pool: RankPool) -> None:
    for y, gradient in pool.run(Mesh(tensor=2), embedded, 13, 0):
        assert y.shape == (0, 7, 4)
        assert not gradient.any()


@pytest.mark.parametrize("wrong", [13, -1])
def test_a_token_outside_the_vocabulary_is_refused(wrong: int) -> None:
    layer = VocabularyEmbedding(13, 4, Normal(1.0), SOLO, CPU, DOUBLE)
    with pytest.raises(ValueError, match=f"token {wrong} is outside the vocabulary of 13; tokens go from 0 to 12"):
        layer(torch.tensor([[0, wrong]]))


# --- cross entropy ---------------------------------------------------------------------------------------------------


def targets_of(vocabulary: int) -> Tensor:
    targets = tokens_of(vocabulary).flip(0)
    targets[1, :3] = -100
    return targets


@dataclass
class Loss:
    """Losses per token, the gradient of the local logits, and bytes of payload that were exchanged."""

    losses: Tensor
    gradient: Tensor
    payload: int


def loss_of(groups: Groups, whole: Tensor, targets: Tensor, vocabulary: int, smoothing: float) -> Loss:
    tensor = groups.tensor
    spec = ParameterSpec((vocabulary,), Normal(1.0), Split(0))
    width = spec.local_shape(tensor.size)[0]
    padded = F.pad(whole, (0, width * tensor.size - vocabulary), value=1e3)  # would win every maximum
    logits = padded[..., tensor.index * width : (tensor.index + 1) * width].clone().requires_grad_()
    losses = vocabulary_cross_entropy(logits, targets, tensor, vocabulary, label_smoothing=smoothing)
    losses.backward(drawn(*losses.shape, seed=9).to(losses.dtype))
    assert logits.grad is not None
    return Loss(losses.detach(), logits.grad, groups.ledger.total().payload)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocabulary", [5, 13, 50257])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_loss_over_cut_logits_equals_torchs_cross_entropy(
    pool: RankPool, size: int, vocabulary: int, smoothing: float
) -> None:
    whole, targets = 3 * drawn(3, 7, vocabulary), targets_of(vocabulary)
    plain = whole.clone().requires_grad_()
    expected = F.cross_entropy(
        plain.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=smoothing
    ).view(3, 7)
    expected.backward(drawn(3, 7, seed=9))
    ranks = pool.run(Mesh(tensor=size), loss_of, whole, targets, vocabulary, smoothing)
    for rank in ranks:
        assert_close(rank.losses, expected)
        assert torch.equal(rank.losses[1, :3], torch.zeros(3, dtype=DOUBLE)), "ignored tokens have no loss"
        # b s maxima, b s target logits, b s sums, and b s sums of logits for smoothing; never b s V.
        assert rank.payload == (0 if size == 1 else (4 if smoothing else 3) * targets.numel() * 8)
    columns = torch.cat([rank.gradient for rank in ranks], -1)
    assert not columns[..., vocabulary:].any(), "padded columns have no gradient at all"
    assert_close(columns[..., :vocabulary], plain.grad)  # type: ignore[arg-type]


def test_an_empty_batch_has_an_empty_loss(pool: RankPool) -> None:
    whole, targets = drawn(0, 7, 13), torch.zeros(0, 7, dtype=torch.int64)
    for rank in pool.run(Mesh(tensor=2), loss_of, whole, targets, 13, 0.1):
        assert rank.losses.shape == (0, 7)
        assert rank.gradient.shape == (0, 7, 7)


def test_huge_logits_neither_overflow_nor_lose_the_loss() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]]], dtype=DOUBLE)
    losses = vocabulary_cross_entropy(logits, torch.tensor([[1, 0]]), SOLO, 3)
    assert losses[0, 0].item() == 2e4
    assert losses[0, 1].item() == pytest.approx(1.0986122886681098, abs=1e-12)


def test_a_token_number_can_be_the_ignored_one() -> None:
    logits = drawn(3, 7, 13).requires_grad_()
    targets = tokens_of(13)
    losses = vocabulary_cross_entropy(logits, targets, SOLO, 13, ignore=0)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
    assert_close(losses.sum(), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_bfloat16_logits_is_computed_in_float32(smoothing: float) -> None:
    logits = (4 * drawn(3, 7, 500)).bfloat16().requires_grad_()
    targets = targets_of(500)
    losses = vocabulary_cross_entropy(logits, targets, SOLO, 500, label_smoothing=smoothing)
    assert losses.dtype == torch.float32
    accurate = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(accurate.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=smoothing)
    assert_close(losses.double().sum(), expected, 1e-6)
    losses.sum().backward()
    expected.backward()
    assert logits.grad is not None
    assert accurate.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logits.grad.double(), accurate.grad, rtol=2**-8, atol=1e-6)


def test_backward_keeps_one_array_of_the_size_of_the_logits_and_gives_it_away() -> None:
    logits = drawn(3, 7, 13).requires_grad_()
    saved: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel() == logits.numel():
            saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = vocabulary_cross_entropy(logits, targets_of(13), SOLO, 13)
    loss.sum().backward()
    assert logits.grad is not None
    assert saved == [logits.grad.data_ptr()]


def test_a_second_backward_pass_through_the_loss_is_refused_instead_of_wrong() -> None:
    loss = vocabulary_cross_entropy(drawn(3, 7, 13).requires_grad_(), targets_of(13), SOLO, 13).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_target_outside_the_vocabulary_is_refused() -> None:
    targets = targets_of(13)
    targets[2, 2] = 13
    with pytest.raises(ValueError, match="token 13 is outside the vocabulary of 13"):
        vocabulary_cross_entropy(drawn(3, 7, 13), targets, SOLO, 13)
