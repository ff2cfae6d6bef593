"""ZeRO-R's checkpoints: every store gives back what it was given, and P_a holds 1/t of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from meshwright.comm.connect import Groups
from meshwright.comm.group import SoloGroup
from meshwright.costs.spec import GPTSpec
from meshwright.layout.layout import Layout
from meshwright.layout.mesh import Mesh
from meshwright.parallel.residual import File, Here, Host, Split, Store
from meshwright.train.parity import Case, deviations, make_engine, train_step
from pool import RankPool

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def stores(tmp_path: Path) -> list[Store]:
    return [
        Here(),
        Host(),
        File(tmp_path),
        Split(SoloGroup("tensor"), Here()),
        Split(SoloGroup("tensor"), File(tmp_path)),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (2, 3, 4)])
def test_every_store_gives_back_what_it_was_given(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for store in stores(tmp_path):
        given = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
        kept = store.keep(given)
        assert store.held == given.nbytes
        back = kept.restore()
        assert back.dtype == dtype
        assert torch.equal(back, given)
        assert (store.held, store.peak) == (0, given.nbytes)


def test_files_go_away_when_restored_and_with_the_store(tmp_path: Path) -> None:
    store = File(tmp_path)
    first, second = store.keep(torch.ones(10)), store.keep(torch.ones(10))
    (folder,) = tmp_path.iterdir()
    assert len(os.listdir(folder)) == 2
    first.restore()
    assert len(os.listdir(folder)) == 1
    del store, second, first
    assert list(tmp_path.iterdir()) == []


def split_and_restore(groups: Groups, numel: int) -> int:
    store = Split(groups.tensor, Here())
    given = torch.arange(numel, dtype=torch.float64)
    kept = store.keep(given)
    held = store.held
    assert torch.equal(kept.restore(), given)
    return held


@pytest.mark.parametrize("numel", [0, 1, 12, 13])
def test_a_split_checkpoint_takes_one_part_in_t_of_the_bytes(pool: RankPool, numel: int) -> None:
    assert pool.run(Mesh(tensor=3), split_and_restore, numel) == [-(-numel // 3) * 8] * 3


SPEC = GPTSpec(layers=3, hidden=16, heads=4, sequence=6, vocabulary=13, dropout=0.2)


def peak(groups: Groups, layout: Layout) -> int:
    engine = make_engine(Case(SPEC, batch=4), layout, groups)
    train_step(engine, Case(SPEC, batch=4), 0, lambda: None)
    assert engine.stage.store.held == 0
    return engine.stage.store.peak


def test_stored_bytes_of_a_step_fall_by_one_over_t(pool: RankPool) -> None:
    # DeepSpeed#3779, #5704: partitioned checkpoints that held the whole all the same
    whole, split = (
        pool.run(Mesh(tensor=2), peak, Layout.parse(f"tp2/recompute-full{suffix}"))[0] for suffix in ("", "/pa")
    )
    assert split == whole / 2
    tokens, activation = 4 * 6 * 8, 4 * 6 * 16 * 8
    assert whole == tokens + 4 * activation  # the embedding's input, three blocks' and the head's


@pytest.mark.parametrize(
    "text", ["tp2/recompute-full/pa/m2", "tp2.pp2/recompute-full/pa-cpu/m3", "dp2.tp2/zero3/recompute-full/pa"]
)
def test_split_checkpoints_change_no_number(pool: RankPool, text: str) -> None:
    layout = Layout.parse(text)
    assert pool.run(layout.mesh, deviations, Case(SPEC), layout)[0].largest < 1e-10
