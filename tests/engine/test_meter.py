"""The memory meter against independent counters, and against what theory says of activations and states."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.comm.connect import Groups, solo
from meshwright.costs.sheet import parameters
from meshwright.costs.spec import GPTSpec
from meshwright.engine.build import build
from meshwright.engine.engine import Engine
from meshwright.engine.meter import Footprint, Meter, Recorder
from meshwright.layout.layout import Layout
from meshwright.layout.share import micro_batch_samples
from meshwright.layout.zero import ZeroStage
from meshwright.model.batch import MicroBatch
from pool import RankPool

SPEC = GPTSpec(layers=2, hidden=32, heads=4, sequence=16, vocabulary=64, tied=False)
BATCH = 4
CPU = torch.device("cpu")


def adam(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-3, fused=True)


def stepping(groups: Groups, layout: Layout, spec: GPTSpec = SPEC) -> tuple[Engine, Callable[[], object]]:
    """An engine, and what makes a step of it."""
    engine = build(spec, layout, groups, adam)
    tokens = torch.arange(BATCH * spec.sequence).view(BATCH, -1) % spec.vocabulary
    parts = micro_batch_samples(BATCH, layout, groups.data.index)
    batches = [MicroBatch(tokens[part.start : part.stop], tokens[part.start : part.stop]) for part in parts]
    return engine, lambda: engine.step(batches, 1e-3)


def footprint(groups: Groups, layout: Layout, spec: GPTSpec = SPEC) -> Footprint:
    """Of the second step."""
    engine, step = stepping(groups, layout, spec)
    step()
    meter = Meter(CPU)
    with meter:
        step()
    return meter.footprint(engine)


# --- recording --------------------------------------------------------------------------------------------------------


def test_a_recording_holds_every_block_and_when_it_came_back() -> None:
    old = torch.empty(1000)
    with Recorder() as recorder:
        kept = torch.empty(100)
        passing = torch.empty(50)
        del passing, old
        torch.empty(0).resize_(25)
    assert [change.nbytes for change in recorder.changes] == [400, 200, -200, 100, -100]
    assert recorder.held == (400, 600, 400, 500, 400)
    assert recorder.changes[1].address == recorder.changes[2].address
    del kept


def test_blocks_that_ended_unseen_do_not_disturb_the_next_recording() -> None:
    with Recorder():
        first = torch.empty(1000)
    del first
    others = [torch.empty(1000) for _ in range(3)]  # one of them where the first was
    with Recorder() as recorder:
        others.clear()
    assert recorder.changes == ()


def test_a_recording_that_fails_leaves_nothing_behind() -> None:
    def failing() -> None:
        with Recorder():
            raise KeyError("in the step")

    with pytest.raises(KeyError, match="in the step"):
        failing()
    with Recorder() as recorder:
        torch.empty(1)
    assert len(recorder.changes) == 2


def test_a_change_names_the_action_around_it() -> None:
    with Recorder() as recorder, torch.profiler.record_function("F0@0.1"):
        torch.ones(3) + torch.ones(3)
    assert {change.scope for change in recorder.changes if change.nbytes > 0} == {"F0@0.1"}


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["m1", "m2/recompute-full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_between_steps_the_allocator_holds_states_and_buffers_and_nothing_else(text: str, dtype: torch.dtype) -> None:
    layout = Layout.parse(text)
    tokens = torch.zeros(1, SPEC.sequence, dtype=torch.int64)
    batches = [MicroBatch(tokens, tokens)] * layout.micro_batches
    with Recorder() as recorder:
        engine = build(SPEC, layout, solo(), adam, dtype=dtype)
        for _ in range(2):
            engine.step(batches, 1e-3)
    rest = recorder.held[-1] - engine.state_bytes().total - engine.stage.buffer_bytes
    assert 0 <= rest < 200  # the optimizer's count of steps, a number for each run of a unit


class Storages(TorchDispatchMode):
    """Counts live storages by what operations return: knows nothing of an operation's inside, and not the profiler."""

    def __init__(self) -> None:
        super().__init__()
        self.held = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in before | self._known:
                self._watch(leaf.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.held -= nbytes


@pytest.mark.parametrize("text", ["m1", "m2", "m1/recompute-full"])
def test_the_activations_equal_those_counted_by_storages(text: str) -> None:
    layout = Layout.parse(text)
    _, step = stepping(solo(), layout)
    step()
    with Storages() as counter:
        step()
    measured = footprint(solo(), layout).activations
    assert counter.peak - counter.held <= measured <= 1.03 * (counter.peak - counter.held)


class Saved:
    """Counts what autograd saves, each storage once, and not what is `there` anyway."""

    def __init__(self, there: list[Tensor]) -> None:
        self._there = {tensor.untyped_storage().data_ptr() for tensor in there}
        self._storages: dict[int, int] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._there:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(self._storages.values())


def saved_by_a_block() -> int:
    """Bytes that autograd saves in a block's forward pass beside parameters and input; and the output, in any case."""
    engine, _ = stepping(solo(), Layout())
    block = engine.stage.layers[1]
    tokens = torch.zeros(BATCH, SPEC.sequence, dtype=torch.int64)
    x = torch.randn(BATCH, SPEC.sequence, SPEC.hidden, requires_grad=True)
    saved = Saved([x, *block.parameters()])
    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        y = block(x, MicroBatch(tokens, tokens))
    saved(y)
    return saved.nbytes


def test_each_block_adds_to_the_peak_what_autograd_saves_for_it() -> None:
    # Temporaries are the same however many blocks there are, so they drop out of the difference; a number for each
    # unit does not, which remembers until the next step whether the gradient was finite.
    few, many = (footprint(solo(), Layout(), replace(SPEC, layers=layers)) for layers in (2, 5))
    assert many.activations - few.activations == pytest.approx(3 * saved_by_a_block(), abs=3 * 4)


def test_with_full_recompute_each_block_adds_its_input_and_that_to_the_buffers() -> None:
    layout = Layout.parse("recompute-full")
    few, many = (footprint(solo(), layout, replace(SPEC, layers=layers)) for layers in (2, 5))
    assert many.activations == pytest.approx(few.activations, abs=3 * 4)
    assert many.buffers - few.buffers == 3 * BATCH * SPEC.sequence * SPEC.hidden * 4


def test_full_recompute_lowers_the_peak() -> None:
    spec = replace(SPEC, layers=6)
    kept, recomputed = (footprint(solo(), Layout.parse(text), spec) for text in ("m1", "recompute-full"))
    assert recomputed.peak < kept.peak
    assert recomputed.activations < 0.5 * kept.activations
    assert recomputed.parameters == kept.parameters


def test_micro_batches_lower_the_activations() -> None:
    one, four = (footprint(solo(), Layout.parse(text)) for text in ("m1", "m4"))
    assert four.activations < 0.3 * one.activations


def test_a_meter_that_has_measured_nothing_says_so() -> None:
    engine, _ = stepping(solo(), Layout())
    with pytest.raises(ValueError, match="has measured no step yet"):
        Meter(CPU).footprint(engine)


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_each_zero_stage_lowers_what_the_meter_finds(gloo_pool: RankPool) -> None:
    spec = replace(SPEC, layers=8)  # so many that a few whole units are little beside the model
    data, whole = 4, 4 * parameters(spec)
    layouts = [Layout(data=data, zero=zero) for zero in ZeroStage]
    found = [gloo_pool.run(layout.mesh, footprint, layout, spec)[0] for layout in layouts]
    assert [each.parameters for each in found] == [whole, whole, whole, whole // data]
    assert [each.gradients for each in found] == [whole, whole, whole // data, whole // data]
    assert [each.optimizer for each in found] == [2 * whole, *[2 * whole // data] * 3]
    assert found[3].peak < found[2].peak < found[1].peak < found[0].peak


def test_buffers_hold_the_gradients_under_way_and_the_checkpoints(gloo_pool: RankPool) -> None:
    layout = Layout.parse("dp2.tp2/zero2/recompute-full/pa")
    block = (12 * 32**2 + 7 * 32) // 2 + 6 * 32  # matrices and the biases of wide ones are cut by two
    checkpoints = 3 * 2 * SPEC.sequence * SPEC.hidden * 4 // 2  # of two blocks and the head, two samples, one part in t
    for found in gloo_pool.run(layout.mesh, footprint, layout):
        pool = found.buffers - checkpoints
        assert pool in [4 * block * count for count in (1, 2, 3, 4)]
