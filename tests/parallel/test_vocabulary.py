"""An embedding and a loss whose vocabulary is cut, in float64, against torch's whole ones on one process."""

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
from meshwright.parallel import vocabulary as module
from meshwright.parallel.parameter import Normal, ParameterSpec, Split, cut, join
from meshwright.parallel.vocabulary import Vocabulary, VocabularyEmbedding, vocabulary_loss
from pool import RankPool

CPU = torch.device("cpu")
DOUBLE = torch.float64
SOLO = SoloGroup("tensor")
HIDDEN = 4


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor | None, tolerance: float = 1e-12) -> None:
    """Equal to `tolerance`, relative to the largest number."""
    assert expected is not None
    largest = float(expected.detach().abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(1e-3, largest))


def table(vocabulary: int) -> ParameterSpec:
    return ParameterSpec((vocabulary, HIDDEN), Normal(1.0), Split(0))


def tokens_of(vocabulary: int) -> Tensor:
    tokens = torch.randint(vocabulary, (3, 7), generator=torch.Generator().manual_seed(1))
    tokens[0, :2] = torch.tensor([0, vocabulary - 1])
    return tokens


# --- embedding -------------------------------------------------------------------------------------------------------


def embedded(groups: Groups, vocabulary: int, samples: int) -> tuple[Tensor, Tensor]:
    tensor = groups.tensor
    layer = VocabularyEmbedding(vocabulary, HIDDEN, Normal(1.0), tensor, CPU, DOUBLE)
    layer.weight = nn.Parameter(cut(drawn(vocabulary, HIDDEN), table(vocabulary), tensor.index, tensor.size).clone())
    y = layer(tokens_of(vocabulary)[:samples])
    y.backward(drawn(samples, 7, HIDDEN, seed=1))
    assert layer.weight.grad is not None
    return y.detach(), layer.weight.grad


@pytest.mark.parametrize("vocabulary", [13, 50257])
@pytest.mark.parametrize("size", [2, 4])
def test_an_embedding_cut_over_the_vocabulary_equals_the_whole_one(pool: RankPool, size: int, vocabulary: int) -> None:
    weight = drawn(vocabulary, HIDDEN).requires_grad_()
    expected = F.embedding(tokens_of(vocabulary), weight)
    expected.backward(drawn(3, 7, HIDDEN, seed=1))
    ranks = pool.run(Mesh(tensor=size), embedded, vocabulary, 3)
    assert all(torch.equal(y, expected) for y, _ in ranks)
    rows = torch.cat([gradient for _, gradient in ranks])
    assert not rows[vocabulary:].any(), "padded rows have no gradient at all"
    assert_close(join([gradient for _, gradient in ranks], table(vocabulary)), weight.grad)


def test_an_empty_batch_can_be_embedded(pool: RankPool) -> None:
    for y, gradient in pool.run(Mesh(tensor=2), embedded, 13, 0):
        assert y.shape == (0, 7, HIDDEN)
        assert not gradient.any()


@pytest.mark.parametrize("wrong", [13, -1, -100])
def test_a_token_outside_the_vocabulary_is_refused(wrong: int) -> None:
    layer = VocabularyEmbedding(13, HIDDEN, Normal(1.0), SOLO, CPU, DOUBLE)
    with pytest.raises(ValueError, match=f"token {wrong} is outside the vocabulary of 13; tokens go from 0 to 12"):
        layer(torch.tensor([[0, wrong]]))


# --- projection and loss ---------------------------------------------------------------------------------------------


def targets_of(vocabulary: int) -> Tensor:
    targets = tokens_of(vocabulary).flip(0)
    targets[1, :3] = -100
    return targets


@dataclass
class Loss:
    """Losses per token, the gradients of the input and of the local rows, and bytes of payload that were exchanged."""

    losses: Tensor
    dx: Tensor
    dweight: Tensor
    forward: int
    backward: int


def loss_of(groups: Groups, x: Tensor, whole: Tensor, targets: Tensor, smoothing: float) -> Loss:
    tensor = groups.tensor
    vocabulary = len(whole)
    rows = table(vocabulary).local_shape(tensor.size)[0]
    padded = F.pad(whole, (0, 0, 0, rows * tensor.size - vocabulary), value=1e3)  # would win every maximum
    weight = padded[tensor.index * rows : (tensor.index + 1) * rows].clone().requires_grad_()
    x = x.clone().requires_grad_()
    losses = vocabulary_loss(x, weight, targets, Vocabulary(tensor, vocabulary, smoothing=smoothing))
    losses.backward(drawn(*losses.shape, seed=9).to(losses.dtype))
    assert x.grad is not None
    assert weight.grad is not None
    payloads = [groups.ledger.total(Kind.ALL_REDUCE, label=label).payload for label in ("loss", "tensor-backward")]
    assert groups.ledger.total().payload == sum(payloads)
    return Loss(losses.detach(), x.grad, weight.grad, payloads[0], payloads[1])


@dataclass
class Plain:
    """What torch makes of the same."""

    losses: Tensor
    dx: Tensor | None
    dweight: Tensor | None


def plain_loss(x: Tensor, whole: Tensor, targets: Tensor, smoothing: float) -> Plain:
    x, weight = x.clone().requires_grad_(), whole.clone().requires_grad_()
    logits = F.linear(x, weight).flatten(0, 1)
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none", label_smoothing=smoothing)
    losses.backward(drawn(targets.numel(), seed=9))
    return Plain(losses.detach().view(targets.shape), x.grad, weight.grad)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocabulary", [5, 13, 50257])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_loss_over_a_cut_vocabulary_equals_torchs(
    pool: RankPool, size: int, vocabulary: int, smoothing: float
) -> None:
    # A vocabulary of 5 on four ranks leaves the last one nothing but padding.
    x, whole, targets = drawn(3, 7, HIDDEN), 3 * drawn(vocabulary, HIDDEN, seed=1), targets_of(vocabulary)
    expected = plain_loss(x, whole, targets, smoothing)
    ranks = pool.run(Mesh(tensor=size), loss_of, x, whole, targets, smoothing)
    for rank in ranks:
        assert_close(rank.losses, expected.losses)
        assert torch.equal(rank.losses[1, :3], torch.zeros(3, dtype=DOUBLE)), "ignored tokens have no loss"
        assert_close(rank.dx, expected.dx)
        assert not rank.dx[1, :3].any(), "and no gradient"
        # b s maxima, b s target logits, b s sums, and b s sums of logits for smoothing; never b s V.
        assert rank.forward == (0 if size == 1 else (4 if smoothing else 3) * targets.numel() * 8)
        assert rank.backward == (0 if size == 1 else x.numel() * 8)
    rows = torch.cat([rank.dweight for rank in ranks])
    assert not rows[vocabulary:].any(), "padded rows have no gradient at all"
    assert_close(rows[:vocabulary], expected.dweight)


@pytest.mark.parametrize("length", [1, 4, 5, 21])
def test_the_size_of_a_block_changes_nothing(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(module, "BLOCK", length)
    x, whole, targets = drawn(3, 7, HIDDEN), drawn(13, HIDDEN, seed=1), targets_of(13)
    expected = plain_loss(x, whole, targets, 0.1)
    x, whole = x.requires_grad_(), whole.requires_grad_()
    losses = vocabulary_loss(x, whole, targets, Vocabulary(SOLO, 13, smoothing=0.1))
    losses.backward(drawn(3, 7, seed=9))
    assert_close(losses, expected.losses)
    assert_close(x.grad, expected.dx)  # type: ignore[arg-type]
    assert_close(whole.grad, expected.dweight)  # type: ignore[arg-type]


def test_an_empty_batch_has_an_empty_loss(pool: RankPool) -> None:
    x, targets = drawn(0, 7, HIDDEN), torch.zeros(0, 7, dtype=torch.int64)
    for rank in pool.run(Mesh(tensor=2), loss_of, x, drawn(13, HIDDEN), targets, 0.1):
        assert rank.losses.shape == (0, 7)
        assert rank.dx.shape == (0, 7, HIDDEN)
        assert not rank.dweight.any()


def loss_of_logits(groups: Groups, logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of logits that one hidden number of 1 brings about: each row of the weight is a logit."""
    tensor = groups.tensor
    spec = ParameterSpec((len(logits), 1), Normal(1.0), Split(0))
    weight = cut(logits.unsqueeze(1), spec, tensor.index, tensor.size)
    x = torch.ones(*targets.shape, 1, dtype=logits.dtype)
    return vocabulary_loss(x, weight, targets, Vocabulary(tensor, len(logits)))


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2])
def test_huge_logits_neither_overflow_nor_lose_the_loss(pool: RankPool, size: int, dtype: torch.dtype) -> None:
    uneven, even = torch.tensor([8192.0, -8192.0, 0.0], dtype=dtype), torch.full((3,), -8192.0, dtype=dtype)
    for losses in pool.run(Mesh(tensor=size), loss_of_logits, uneven, torch.tensor([[1, 0, 2]])):
        assert losses.tolist() == [[2 * 8192.0, 0.0, 8192.0]]
    for losses in pool.run(Mesh(tensor=size), loss_of_logits, even, torch.tensor([[0, 1, 2]])):
        assert losses.tolist()[0] == pytest.approx([1.0986122886681098] * 3, abs=1e-12 if dtype is DOUBLE else 1e-6)


def test_a_token_number_can_be_the_ignored_one() -> None:
    x, weight, targets = drawn(3, 7, HIDDEN).requires_grad_(), drawn(13, HIDDEN, seed=1), tokens_of(13)
    losses = vocabulary_loss(x, weight, targets, Vocabulary(SOLO, 13, ignore=0))
    logits = F.linear(x, weight).flatten(0, 1)
    assert_close(losses.sum(), F.cross_entropy(logits, targets.flatten(), ignore_index=0, reduction="sum"))
    losses.sum().backward()
    assert x.grad is not None
    assert not x.grad[targets == 0].any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_a_bfloat16_model_is_computed_in_float32(smoothing: float) -> None:
    x, weight = (2 * drawn(3, 7, 8)).bfloat16().requires_grad_(), drawn(500, 8, seed=1).bfloat16().requires_grad_()
    targets = targets_of(500)
    losses = vocabulary_loss(x, weight, targets, Vocabulary(SOLO, 500, smoothing=smoothing))
    assert losses.dtype == torch.float32
    logits = F.linear(x, weight).detach().double().requires_grad_()  # rounded to bfloat16, and from there on exact
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=smoothing)
    assert_close(losses.double().sum(), expected, 1e-6)
    losses.sum().backward()
    expected.backward()
    assert logits.grad is not None
    for found, exact in (
        (x.grad, logits.grad @ weight.detach().double()),
        (weight.grad, logits.grad.flatten(0, 1).T @ x.detach().double().flatten(0, 1)),
    ):
        assert found is not None
        assert found.dtype == torch.bfloat16
        assert_close(found.double(), exact, 2**-7)


def test_a_likely_target_keeps_its_small_gradient_in_bfloat16() -> None:
    # p = 0.999: rounded to bfloat16 it is 1, and p - 1 would be 0 instead of -0.001.
    weight = torch.tensor([[7.6], [0.0], [0.0]], dtype=torch.bfloat16)
    x = torch.ones(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    loss = vocabulary_loss(x, weight, torch.tensor([[0]]), Vocabulary(SOLO, 3))
    loss.sum().backward()
    exact = weight[0].double() * (weight[:, 0].double().softmax(0)[0] - 1)
    torch.testing.assert_close(x.grad.double().view(1), exact, rtol=2**-7, atol=0)  # type: ignore[union-attr]


def largest_kept(weight: Tensor, x: Tensor, targets: Tensor) -> list[Tensor]:
    """What the graph keeps of at least the logits' size."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel() >= targets.numel() * len(weight):
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        vocabulary_loss(x, weight, targets, Vocabulary(SOLO, len(weight)))
    return kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_array_of_the_logits_size_is_kept_in_their_dtype_and_none_without_a_graph(dtype: torch.dtype) -> None:
    x, weight = drawn(3, 7, HIDDEN).to(dtype).requires_grad_(), drawn(13, HIDDEN).to(dtype)
    (kept,) = largest_kept(weight, x, targets_of(13))
    assert kept.dtype == dtype
    with torch.no_grad():
        assert not largest_kept(weight, x, targets_of(13))


def test_a_frozen_projection_still_passes_a_gradient_down_and_a_frozen_input_none() -> None:
    x, weight = drawn(3, 7, HIDDEN), drawn(13, HIDDEN, seed=1)
    expected = plain_loss(x, weight, targets_of(13), 0.0)
    input_only = x.clone().requires_grad_()
    vocabulary_loss(input_only, weight, targets_of(13), Vocabulary(SOLO, 13)).backward(drawn(3, 7, seed=9))
    assert_close(input_only.grad, expected.dx)  # type: ignore[arg-type]
    weight_only = weight.clone().requires_grad_()
    vocabulary_loss(x, weight_only, targets_of(13), Vocabulary(SOLO, 13)).backward(drawn(3, 7, seed=9))
    assert_close(weight_only.grad, expected.dweight)  # type: ignore[arg-type]


def test_a_gradient_of_the_projection_that_is_there_already_is_added_to_where_it_lies() -> None:
    x, weight = drawn(3, 7, HIDDEN), drawn(13, HIDDEN, seed=1).requires_grad_()
    expected = plain_loss(x, weight.detach(), targets_of(13), 0.0).dweight
    there = weight.grad = torch.ones_like(weight)
    vocabulary_loss(x, weight, targets_of(13), Vocabulary(SOLO, 13)).backward(drawn(3, 7, seed=9))
    assert weight.grad is there
    assert expected is not None
    assert_close(there, expected + 1)


def test_a_second_backward_pass_through_the_loss_is_refused_instead_of_wrong() -> None:
    x = drawn(3, 7, HIDDEN).requires_grad_()
    loss = vocabulary_loss(x, drawn(13, HIDDEN), targets_of(13), Vocabulary(SOLO, 13)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_target_outside_the_vocabulary_is_refused() -> None:
    targets = targets_of(13)
    targets[2, 2] = 13
    with pytest.raises(ValueError, match="token 13 is outside the vocabulary of 13"):
        vocabulary_loss(drawn(3, 7, HIDDEN), drawn(13, HIDDEN), targets, Vocabulary(SOLO, 13))
