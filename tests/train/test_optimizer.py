"""The learning rate over the steps, and what weight decay applies to."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from meshwright.train.config import OptimizerConfig
from meshwright.train.optimizer import adamw, learning_rate

CONFIG = OptimizerConfig(learning_rate=1.0, warmup=4, final_ratio=0.1)


def test_the_rate_rises_linearly_and_falls_along_half_a_cosine_to_its_final_part() -> None:
    rates = [learning_rate(CONFIG, step, 101) for step in range(101)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert rates[52] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("steps", [1, 2, 4, 5])
def test_runs_shorter_than_the_warm_up_are_fine(steps: int) -> None:
    assert all(0 < learning_rate(CONFIG, step, steps) <= 1 for step in range(steps))


def test_without_warm_up_the_first_step_has_the_highest_rate() -> None:
    assert learning_rate(OptimizerConfig(learning_rate=2.0, warmup=0), 0, 10) == 2.0


def test_only_decayed_groups_have_weight_decay() -> None:
    groups = [{"params": [torch.zeros(2)], "decay": True}, {"params": [torch.zeros(2)], "decay": False}]
    optimizer = adamw(OptimizerConfig(weight_decay=0.3))(groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
