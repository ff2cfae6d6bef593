"""ZeRO-R's checkpoints: every store gives back what it was given, and P_a holds 1/t of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, final

import pytest
import torch

from meshwright.comm.connect import Groups, solo
from meshwright.comm.group import SoloGroup
from meshwright.costs.heap import Fit, Heap
from meshwright.costs.spec import GPTSpec
from meshwright.engine.meter import Recorder
from meshwright.layout.layout import Layout
from meshwright.layout.mesh import Mesh
from meshwright.parallel.residual import File, Here, Host, Kept, Split, Store
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
        kept.release()
        assert (store.held, store.peak) == (0, given.nbytes)


def test_files_go_away_when_restored_and_with_the_store(tmp_path: Path) -> None:
    store = File(tmp_path)
    first, second = store.keep(torch.ones(10)), store.keep(torch.ones(10))
    (folder,) = tmp_path.iterdir()
    assert len(os.listdir(folder)) == 2
    first.restore()
    first.release()
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
    activation = 4 * 6 * 16 * 8
    assert whole == 4 * activation  # the inputs of three blocks and of the head; tokens stay with their batch


@pytest.mark.parametrize("text", ["recompute-full/m2", "recompute-full/pa-cpu/m2", "recompute-full/gpipe/m3"])
def test_checkpoints_lie_side_by_side_in_memory_that_is_asked_for_in_the_first_step_only(text: str) -> None:
    case, places = Case(SPEC, batch=12), list[int]()
    engine = make_engine(case, Layout.parse(text), solo())
    train_step(engine, case, 0, lambda: None)
    store = engine.stage.store
    assert isinstance(store, Here | Host)
    assert store._arenas is not None
    blocks, keep = store._arenas.blocks, store.keep
    assert blocks == (3 if "gpipe" in text else 1)  # one for each micro-batch in flight
    assert store.reserved == store.peak  # (the sizes of this case are multiples of what slots are rounded to)

    def watching(tensor: torch.Tensor) -> Kept:
        kept = keep(tensor)
        places.append(kept.restore().data_ptr())
        return kept

    store.keep = watching  # type: ignore[method-assign]
    for step in (1, 2):
        train_step(engine, case, step, lambda: None)
    assert store._arenas.blocks == blocks
    slot = store.reserved // (4 * blocks)
    assert len(places) == 2 * 4 * engine.layout.micro_batches
    for micro_batch in zip(*[iter(places)] * 4, strict=True):  # of three blocks and the head
        assert max(micro_batch) - min(micro_batch) == 3 * slot


@final
class AsTheyCome(Store):
    """What the stores do not do: the very tensors, wherever the forward pass put them."""

    reserved = 0

    def keep(self, tensor: torch.Tensor) -> Kept:
        return AsItCame(tensor)

    def reserve(self, like: torch.Tensor, count: int) -> None:
        pass


@dataclass(frozen=True)
class AsItCame:
    tensor: torch.Tensor

    def restore(self) -> torch.Tensor:
        return self.tensor

    def release(self) -> None:
        pass


def fragmentation_after_forward(store: Store) -> float:
    """Of the second step, in a model of a memory that is as large as has been needed until then."""
    case = Case(GPTSpec(layers=8, hidden=32, heads=4, sequence=64, vocabulary=64), batch=8)
    with Recorder() as recorder:
        engine = make_engine(case, Layout.parse("recompute-full"), solo())
        engine.stage.store = store
        train_step(engine, case, 0, lambda: None)
        recompute = engine.stage.recompute

        def named(*arguments: Any) -> None:
            with torch.profiler.record_function("backward"):
                recompute(*arguments)

        engine.stage.recompute = named  # type: ignore[method-assign]
        train_step(engine, case, 1, lambda: None)
    heap, addresses = Heap(Fit.FIRST), dict[int, int]()
    for change in takewhile(lambda change: change.scope != "backward", recorder.changes):
        if change.nbytes > 0:
            addresses[change.address] = heap.take(change.nbytes)
        else:
            heap.give(addresses.pop(change.address))
    return heap.fragmentation(heap.needed)


def test_an_arena_leaves_what_is_free_after_the_forward_pass_in_fewer_pieces() -> None:
    scattered, together = fragmentation_after_forward(AsTheyCome()), fragmentation_after_forward(Here())
    assert together < 0.5 * scattered


@pytest.mark.parametrize(
    "text", ["tp2/recompute-full/pa/m2", "tp2.pp2/recompute-full/pa-cpu/m3", "dp2.tp2/zero3/recompute-full/pa"]
)
def test_split_checkpoints_change_no_number(pool: RankPool, text: str) -> None:
    layout = Layout.parse(text)
    assert pool.run(layout.mesh, deviations, Case(SPEC), layout)[0].largest < 1e-10
