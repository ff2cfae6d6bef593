"""meshwright in the contest: its engine for the same GPT, at one stage of ZeRO."""

from __future__ import annotations

from typing import Any

import torch

from contest.rivals import TIMEOUT, Train
from contest.work import DTYPES, LEARNING_RATE, SEED, WEIGHT_DECAY, Batch, Seat
from meshwright.comm.connect import connect
from meshwright.comm.start import Start
from meshwright.engine.build import build
from meshwright.layout.layout import Layout
from meshwright.layout.zero import ZeroStage
from meshwright.model.batch import MicroBatch


def ours(seat: Seat, stage: int) -> Train:
    """Data parallel over all ranks with ZeRO `stage`."""
    layout = Layout(data=seat.ranks, zero=ZeroStage(stage))
    start = Start(seat.rank, seat.ranks, seat.rank, seat.ranks, f"file://{seat.meeting}", 0, agent_store=False)
    groups = connect(layout.mesh, start, torch.device("cpu"), timeout=TIMEOUT)
    engine = build(seat.work.spec, layout, groups, _adamw, seed=SEED, dtype=DTYPES[seat.work.dtype])

    def train(batch: Batch) -> float:
        return engine.step([MicroBatch(batch.tokens, batch.targets)], LEARNING_RATE).loss

    return train


def _adamw(pieces: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pieces, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
