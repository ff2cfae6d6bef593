"""The CUDA and NCCL paths on one GPU; skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.comm.backend import nccl
from meshwright.comm.connect import solo
from meshwright.comm.group import Reduction
from meshwright.comm.ledger import Ledger
from meshwright.comm.torch_group import TorchGroup
from meshwright.costs.spec import GPTSpec
from meshwright.engine.tracer import Tracer
from meshwright.layout.layout import Layout
from meshwright.parallel.residual import Host
from meshwright.train.parity import Case, deviations, make_engine, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")]

# Without dropout: a CPU and a GPU draw different masks.
CASE = Case(GPTSpec(layers=2, hidden=16, heads=4, sequence=5, vocabulary=13, dropout=0.0))


@pytest.mark.parametrize("text", ["m1", "m3", "m2/recompute-full", "m2/recompute-full/pa-cpu"])
def test_a_gpu_trains_like_one_cpu_process(text: str) -> None:
    result = deviations(solo(torch.device("cuda", 0)), CASE, Layout.parse(text))
    assert result.largest < 1e-10


def test_nccl_of_one_rank_computes_every_collective(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    backend = nccl(dist.FileStore(str(tmp_path / "store"), 1), 0, 1, 60.0, urgent=False)
    group = TorchGroup("data", (0,), 0, Ledger(), backend, native=True)
    given = torch.arange(8.0, device=device)
    for act in (
        lambda x: group.all_reduce(x, label="test"),
        lambda x: group.all_reduce(x, label="test", reduction=Reduction.MAX),
        lambda x: group.broadcast(x, 0, label="test"),
    ):
        x = given.clone()
        act(x)
        assert torch.equal(x, given)
    for act in (group.reduce_scatter, group.all_gather, group.all_to_all):
        target = torch.zeros_like(given)
        act(given.clone(), target, label="test")
        assert torch.equal(target, given)
    group.barrier()


def test_a_step_is_traced_with_the_times_of_the_device() -> None:
    groups = solo(torch.device("cuda", 0))
    engine = make_engine(CASE, Layout(), groups)
    tracer = Tracer(0, groups.device)
    tracer.begin("step")
    train_step(engine, CASE, 0, lambda: None)
    tracer.end()
    assert tracer.timeline().makespan > 0


def test_checkpoints_go_to_pinned_memory_and_come_back() -> None:
    given = torch.randn(1000, 7, device="cuda")
    store = Host()
    kept = store.keep(given.clone())
    assert torch.equal(kept.restore(), given)
