"""Dropout masks depend on seed, step, sample, site, head and element, and on nothing of the layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.comm.connect import Groups
from meshwright.layout.mesh import Mesh
from meshwright.parallel.noise import Dropout, Noise
from pool import RankPool

CPU = torch.device("cpu")
SHAPE = (5, 6)


def mask(*samples: int, seed: int = 1, step: int = 2, site: str = "a", heads: tuple[int, ...] | None = None) -> Tensor:
    return Noise(seed, step, samples).keep_mask(site, 0.5, SHAPE, CPU, heads)


def test_masks_do_not_depend_on_how_samples_are_grouped() -> None:
    whole = mask(0, 1, 2, 3)
    assert torch.equal(whole, torch.cat([mask(0), mask(1, 2, 3)]))
    assert torch.equal(whole.flip(0), mask(3, 2, 1, 0))


def test_masks_do_not_depend_on_which_rank_has_the_heads() -> None:
    whole = mask(4, 5, heads=(0, 1, 2, 3))
    assert whole.shape == (2, 4, *SHAPE)
    assert torch.equal(whole, torch.cat([mask(4, 5, heads=(0, 1)), mask(4, 5, heads=(2, 3))], 1))


def test_masks_differ_between_seeds_steps_samples_sites_and_heads() -> None:
    masks = [
        mask(0),
        mask(0, seed=2),
        mask(0, step=3),
        mask(1),
        mask(0, site="b"),
        mask(0, heads=(0,))[:, 0],
        mask(0, heads=(1,))[:, 0],
        mask(12),
        mask(2, step=1),
    ]
    for index, one in enumerate(masks):
        assert all(not torch.equal(one, other) for other in masks[:index])


def test_a_mask_is_replayed_exactly_whatever_happened_to_torchs_own_random_state() -> None:
    first = mask(0, 1)
    torch.manual_seed(5)
    torch.rand(3)
    state = torch.get_rng_state()
    assert torch.equal(first, mask(0, 1))
    assert torch.equal(state, torch.get_rng_state())


def test_elements_are_dropped_with_the_probability_asked_for() -> None:
    kept = Noise(1, 1, tuple(range(16))).keep_mask("a", 0.1, (64, 64), CPU)
    assert kept.double().mean().item() == pytest.approx(0.9, abs=0.005)
    rates = kept.double().mean((1, 2))
    assert (rates - 0.9).abs().max() < 0.025


def test_an_empty_micro_batch_has_an_empty_mask() -> None:
    assert mask().shape == (0, *SHAPE)
    assert mask(heads=(2, 3)).shape == (0, 2, *SHAPE)
    dropout = Dropout(0.5, "a")
    assert dropout(torch.ones(0, 5, 6), Noise(1, 2, ())).shape == (0, 5, 6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_same_elements_survive_in_every_dtype_and_are_scaled(dtype: torch.dtype) -> None:
    x = torch.ones(2, *SHAPE, dtype=dtype, requires_grad=True)
    y = Dropout(0.5, "a")(x, Noise(1, 2, (0, 1)))
    y.sum().backward()
    assert y.dtype == dtype
    assert torch.equal(y.bool(), mask(0, 1))
    assert set(y.detach().unique().tolist()) == {0.0, 2.0}
    assert torch.equal(x.grad, y.detach())


def test_without_noise_or_probability_the_input_passes_untouched() -> None:
    x = torch.randn(2, *SHAPE)
    assert Dropout(0.5, "a")(x, None) is x
    assert Dropout(0.0, "a")(x, Noise(1, 2, (0, 1))) is x


@pytest.mark.parametrize("probability", [-0.1, 1.0, 1.5])
def test_what_is_no_probability_is_refused(probability: float) -> None:
    with pytest.raises(ValueError, match=r"is not a probability in \[0, 1\); 0 turns it off"):
        Dropout(probability, "a")


def masks_of_rank(groups: Groups) -> tuple[Tensor, Tensor]:
    """The mask on replicated activations, and on this rank's two of four heads; each data rank has its own samples."""
    samples = (2 * groups.data.index, 2 * groups.data.index + 1)
    heads = (2 * groups.tensor.index, 2 * groups.tensor.index + 1)
    return mask(*samples), mask(*samples, heads=heads)


def test_replicas_share_a_mask_and_shards_and_data_ranks_have_their_own(pool: RankPool) -> None:
    mesh = Mesh(data=2, tensor=2)
    replicated, sharded = zip(*pool.run(mesh, masks_of_rank), strict=True)
    assert torch.equal(replicated[0], replicated[1])
    assert torch.equal(replicated[2], replicated[3])
    assert not torch.equal(replicated[0], replicated[2])
    for index, one in enumerate(sharded):
        assert all(not torch.equal(one, other) for other in sharded[:index])
    assert torch.equal(torch.cat(replicated[::2]), mask(0, 1, 2, 3))
    together = torch.cat([torch.cat(sharded[:2], 1), torch.cat(sharded[2:], 1)])
    assert torch.equal(together, mask(0, 1, 2, 3, heads=(0, 1, 2, 3)))
