"""Whether memory falls to pieces, with and without arenas for what lives long (M_D; ZeRO, section 6.3).

    python benchmarks/fragmentation.py [--layers 12] [--hidden 128] [--sequence 128] [--vocabulary 256] [--batch 16]
                                       [--steps 4] [--json]

A small GPT is trained with full recomputation in one process, three ways, and every block of memory that torch's
allocator hands out or takes back is recorded, from the making of the model to the end of the last step:

    plain torch      torch.utils.checkpoint around every block; gradients made in backward and dropped after the step
    flat gradients   meshwright, but checkpoints stay where the forward pass happened to put them
    arenas           meshwright: checkpoints are copied into an arena too

The three sequences are replayed in a model of a memory without pages (`costs/heap.py`), first with samples of the same
length in every step, then with lengths that change from step to step.

    alive      MB at the highest moment, rounded to the alignment
    needed     MB of address space: what the memory must have
    wasted     needed / alive - 1
    largest    MB of the largest free block after the last step's forward pass, in a memory as large as the neediest of
               the three must have
    fragments  1 - largest / everything free, at that moment

On a GPU the same is trained there, and what torch's caching allocator reports is printed below: reserved / allocated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from contest.model import GPT, initialised
from meshwright.comm.connect import solo
from meshwright.costs.heap import Fit, Heap
from meshwright.costs.spec import GPTSpec
from meshwright.engine.build import build
from meshwright.engine.meter import Change, Recorder
from meshwright.engine.tracer import Tracer
from meshwright.layout.layout import Layout
from meshwright.model.batch import MicroBatch
from meshwright.parallel.residual import Kept, Store

LENGTHS = (1.0, 0.625, 0.875, 0.5, 0.75)
"""Parts of the longest sample that the samples of one step after the other have."""

Step = Callable[[Tensor, str], None]
"""Train on tokens (b, s); what happens while forward passes run is recorded under names that begin with the word."""


@dataclass(frozen=True)
class Row:
    """What one way of training needs with one policy; bytes."""

    way: str
    lengths: str
    fit: str
    alive: int
    needed: int
    largest: int
    fragments: float


# --- three ways to train ----------------------------------------------------------------------------------------------


def plain_torch(spec: GPTSpec, device: torch.device) -> Step:
    """What anybody would write."""
    model: GPT = initialised(spec, seed=0).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(tokens: Tensor, forward: str) -> None:
        with record_function(forward):
            x = model.embedding(tokens)
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            loss = F.cross_entropy(checkpoint(model.head, x, use_reentrant=False).flatten(0, 1), tokens.flatten())
            del x
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def meshwright(spec: GPTSpec, device: torch.device, store: Store | None = None) -> Step:
    """Ours; checkpoints wait in `store`, or where the layout says."""
    engine = build(spec, Layout.parse("recompute-full"), solo(device), _adamw)
    if store is not None:
        engine.stage.store = store

    def step(tokens: Tensor, forward: str) -> None:
        with Naming(forward, device) as tracer:
            engine.step([MicroBatch(tokens, tokens)], 1e-3, tracer=tracer)

    return step


def _adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-3, fused=True)


@final
class AsTheyCome(Store):
    """Keeps the very tensors it is given."""

    def keep(self, tensor: Tensor) -> Kept:
        """See `Store`."""
        return _AsItCame(tensor)

    def reserve(self, like: Tensor, count: int) -> None:
        """See `Store`."""

    @property
    def reserved(self) -> int:
        """See `Store`."""
        return 0


@final
@dataclass(frozen=True)
class _AsItCame:
    tensor: Tensor

    def restore(self) -> Tensor:
        return self.tensor

    def release(self) -> None:
        """Whoever has it drops it."""


class Naming(Tracer):
    """Gives every action a name that the recorder sees; those of forward passes begin with `forward`."""

    def __init__(self, forward: str, device: torch.device) -> None:
        super().__init__(0, device)
        self._forward = forward
        self._scope: record_function | None = None

    def __enter__(self) -> Naming:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self, label: str) -> None:
        """See `Tracer`."""
        self.end()
        self._scope = record_function(self._forward if label.startswith("F") else label)
        self._scope.__enter__()

    def end(self) -> None:
        """See `Tracer`."""
        if self._scope is not None:
            self._scope.__exit__(None, None, None)
        self._scope = None


WAYS: dict[str, Callable[[GPTSpec, torch.device], Step]] = {
    "plain torch": plain_torch,
    "flat gradients": lambda spec, device: meshwright(spec, device, AsTheyCome()),
    "arenas": meshwright,
}


def train(way: str, spec: GPTSpec, batch: int, lengths: Sequence[int], device: torch.device) -> None:
    """Make the model and train it, a step on samples of each length."""
    step = WAYS[way](spec, device)
    for number, length in enumerate(lengths):
        step(torch.zeros(batch, length, dtype=torch.int64, device=device), f"forward {number}")


# --- replay -----------------------------------------------------------------------------------------------------------


def replay(changes: Sequence[Change], fit: Fit, until: int | None = None) -> tuple[Heap, int]:
    """The heap after the changes before `until`, and the most bytes that were alive in it."""
    heap, peak = Heap(fit), 0
    address: dict[int, int] = {}
    for change in changes[:until]:
        if change.nbytes > 0:
            address[change.address] = heap.take(change.nbytes)
            peak = max(peak, heap.alive)
        else:
            heap.give(address.pop(change.address))
    return heap, peak


def after_forward(changes: Sequence[Change], steps: int) -> int:
    """How many changes there were until the end of the last step's forward pass."""
    return 1 + max(index for index, change in enumerate(changes) if change.scope == f"forward {steps - 1}")


def rows(recorded: dict[str, Sequence[Change]], kind: str, steps: int) -> list[Row]:
    """Every way with every policy."""
    found = []
    for fit in Fit:
        whole = {way: replay(changes, fit) for way, changes in recorded.items()}
        size = max(heap.needed for heap, _ in whole.values())
        for way, changes in recorded.items():
            heap, alive = whole[way]
            then, _ = replay(changes, fit, after_forward(changes, steps))
            largest = max((hole.nbytes for hole in then.holes(size)), default=0)
            found.append(Row(way, kind, fit.value, alive, heap.needed, largest, then.fragmentation(size)))
    return found


def text(found: Sequence[Row]) -> str:
    """A line for each row."""
    lines = [
        f"{'lengths':<9}{'fit':<7}{'':<16}"
        + "".join(f"{name:>11}" for name in ("alive", "needed", "wasted", "largest"))
    ]
    lines[0] += f"{'fragments':>11}"
    for row in found:
        sizes = f"{row.alive / 1e6:>11.2f}{row.needed / 1e6:>11.2f}{row.needed / row.alive - 1:>11.1%}"
        lines.append(
            f"{row.lengths:<9}{row.fit:<7}{row.way:<16}{sizes}{row.largest / 1e6:>11.2f}{row.fragments:>11.1%}"
        )
    return "\n".join(lines)


def on_gpu(spec: GPTSpec, batch: int, lengths: Sequence[int], kind: str) -> None:
    """What the caching allocator needs for the same steps."""
    device = torch.device("cuda")
    for way in WAYS:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        train(way, spec, batch, lengths, device)
        stats = torch.cuda.memory_stats(device)
        reserved, allocated = stats["reserved_bytes.all.peak"], stats["allocated_bytes.all.peak"]
        idle = stats["inactive_split_bytes.all.peak"]
        print(
            f"{kind:<9}cuda   {way:<16}allocated {allocated / 1e6:.2f} MB, reserved {reserved / 1e6:.2f} MB "
            f"({reserved / allocated - 1:.1%} more), in pieces {idle / 1e6:.2f} MB"
        )


def main() -> None:
    """Record, replay, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    defaults = {"layers": 12, "hidden": 128, "sequence": 128, "vocabulary": 256, "batch": 16, "steps": 4}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args()
    spec = GPTSpec(given.layers, given.hidden, given.hidden // 32, given.sequence, given.vocabulary, tied=False)
    kinds = {
        "equal": [given.sequence] * given.steps,
        "changing": [int(LENGTHS[step % len(LENGTHS)] * given.sequence) for step in range(given.steps)],
    }
    found: list[Row] = []
    for kind, lengths in kinds.items():
        recorded: dict[str, Sequence[Change]] = {}
        for way in WAYS:
            with Recorder() as recorder:
                train(way, spec, given.batch, lengths, torch.device("cpu"))
            recorded[way] = recorder.changes
        found += rows(recorded, kind, given.steps)
    print(json.dumps([asdict(row) for row in found], indent=1) if given.json else text(found))
    if torch.cuda.is_available() and not given.json:
        for kind, lengths in kinds.items():
            on_gpu(spec, given.batch, lengths, kind)


if __name__ == "__main__":
    main()
