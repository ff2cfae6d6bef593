"""AdamW and the learning rate over the steps."""

from __future__ import annotations

import math
from typing import Any

import torch

from meshwright.parallel.elementwise import OptimizerFactory
from meshwright.train.config import OptimizerConfig


def adamw(config: OptimizerConfig) -> OptimizerFactory:
    """A factory of fused AdamW in which only the decayed pieces (matrices, not norms and biases) have weight decay."""

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        for group in groups:
            group["weight_decay"] = config.weight_decay if group["decay"] else 0.0
        return torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )

    return make


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to `final_ratio` of the peak, reached with the last of `steps`."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, steps - 1 - config.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.learning_rate * (config.final_ratio + (1 - config.final_ratio) * cosine)
