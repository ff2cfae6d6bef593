"""Dropout whose masks do not depend on the layout.

A mask is a function of (seed, step, sample, site, head, element) and of nothing else: not of how samples are grouped
into micro-batches, which rank computes them, how heads are spread, or how often it is computed. So replicas agree
without talking, shards differ, and recomputation replays the same mask without any random state being saved.

    site "blocks.2.mlp"               one stream per sample          (b, s, h)
    site "blocks.2.attention"         one stream per sample, head    (b, a/t, s, s)

Megatron-LM (Shoeybi et al., 2019), section 3, keeps random states per rank to the same end; keys need no state.
A CPU and a GPU draw different masks from the same key.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from meshwright.parallel.parameter import generator, reseed


@dataclass(frozen=True)
class Noise:
    """The randomness of one micro-batch: the run's seed, the step, and its samples' numbers in the whole batch."""

    seed: int
    step: int
    samples: tuple[int, ...]

    def keep_mask(
        self,
        site: str,
        probability: float,
        shape_per_sample: tuple[int, ...],
        device: torch.device,
        heads: tuple[int, ...] | None = None,
    ) -> Tensor:
        """True where an element survives, each dropped with `probability`.

        Args:
            site: name of the place in the model.
            probability: of an element to be dropped.
            shape_per_sample: what one stream fills: one sample's activations, or one head of them.
            device: where the mask is needed.
            heads: *global* numbers of the heads this rank computes; each has its own stream.

        Returns:
            bool (b, *shape_per_sample), or (b, len(heads), *shape_per_sample) where `heads` are given.
        """
        streams = [(sample, head) for sample, head in product(self.samples, (None,) if heads is None else heads)]
        leading = (len(self.samples),) if heads is None else (len(self.samples), len(heads))
        mask = torch.empty((*leading, *shape_per_sample), dtype=torch.bool, device=device)
        # Always float32, whatever the activations are, so the mask is the same for every dtype.
        uniform = torch.empty(shape_per_sample, dtype=torch.float32, device=device)
        stream = generator(device)
        for keep, (sample, head) in zip(mask.view(len(streams), *shape_per_sample), streams, strict=True):
            reseed(stream, "noise", self.seed, self.step, sample, site, head)
            torch.ge(uniform.uniform_(generator=stream), probability, out=keep)
        return mask


class Dropout(nn.Module):
    """Inverted dropout: what survives is divided by the probability to survive, so evaluation changes nothing."""

    def __init__(self, probability: float, site: str) -> None:
        super().__init__()
        if not 0 <= probability < 1:
            raise ValueError(f"dropout {probability} at {site} is not a probability in [0, 1); 0 turns it off")
        self.probability = probability
        self.site = site

    def forward(self, x: Tensor, noise: Noise | None, heads: tuple[int, ...] | None = None) -> Tensor:
        """Drop elements of `x`, (b, ...) or (b, heads, ...) where `heads` are given; without `noise`, return `x`."""
        if noise is None or self.probability == 0:
            return x
        assert len(noise.samples) == x.shape[0], f"noise for {len(noise.samples)} samples, {x.shape[0]} given"
        shape = tuple(x.shape[1:] if heads is None else x.shape[2:])
        keep = noise.keep_mask(self.site, self.probability, shape, x.device, heads)
        # Autograd keeps the mask in one byte per element, and the scaling saves nothing.
        return x.mul(keep).mul_(1 / (1 - self.probability))

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"{self.probability}, site={self.site!r}"
