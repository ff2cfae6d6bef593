"""meshwright in the contest, at one stage of ZeRO: its engine for the same GPT, and `parallelize` of the rivals'."""

from __future__ import annotations

from typing import Any

import torch

from contest.model import initialised
from contest.rivals import TIMEOUT, Train
from contest.work import DTYPES, LEARNING_RATE, SEED, WEIGHT_DECAY, Batch, Seat
from meshwright import parallelize
from meshwright.comm.connect import Groups, connect
from meshwright.comm.start import Start
from meshwright.engine.build import build
from meshwright.layout.layout import Layout
from meshwright.layout.zero import ZeroStage
from meshwright.model.batch import MicroBatch


def ours(seat: Seat, stage: int) -> Train:
    """Data parallel over all ranks with ZeRO `stage`."""
    layout = Layout(data=seat.ranks, zero=ZeroStage(stage))
    groups = _groups(seat, layout)
    engine = build(seat.work.spec, layout, groups, _adamw, seed=SEED, dtype=DTYPES[seat.work.dtype])

    def train(batch: Batch) -> float:
        return engine.step([MicroBatch(batch.tokens, batch.targets)], LEARNING_RATE).loss

    return train


def any_module(seat: Seat, stage: int) -> Train:
    """The same for the module that the rivals train, of which nothing is known beforehand."""
    layout = Layout(data=seat.ranks, zero=ZeroStage(stage))
    model = parallelize(
        initialised(seat.work.spec, SEED),
        layout,
        optimizer=_adamw,
        loss=lambda module, batch: module(batch.tokens, batch.targets),
        groups=_groups(seat, layout),
        dtype=DTYPES[seat.work.dtype],
    )
    return lambda batch: model.step([batch]).loss


def _groups(seat: Seat, layout: Layout) -> Groups:
    start = Start(seat.rank, seat.ranks, seat.rank, seat.ranks, f"file://{seat.meeting}", 0, agent_store=False)
    return connect(layout.mesh, start, torch.device("cpu"), timeout=TIMEOUT)


def _adamw(pieces: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pieces, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
