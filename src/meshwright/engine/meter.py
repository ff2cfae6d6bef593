"""Measures the memory of one step on this rank, from what torch's allocator did.

    between steps   parameters │ gradients │ optimizer states │ buffers
    at the peak     parameters │ gradients │ optimizer states │ buffers │ activations ........ peak

What lives between steps its owners report (memory that ranks share does not come from torch's allocator). The rest of
the peak is what the allocator held at its highest moment beyond what it held when the step was over: activations,
their gradients, and the temporaries of the operation that ran at that moment.

On a CPU torch's profiler reports every allocation, also those inside an operation and those that autograd makes; what
other libraries ask the system for by themselves is not seen. On a GPU the allocator keeps the figures itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile

from meshwright.layout.layout import Layout
from meshwright.layout.zero import StateBytes, places


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank: what lives between steps, what a step adds at its highest moment, and the sum of all.

    `parameters`, `gradients` and `optimizer` are the model states on the device, of memory that ranks share this rank's
    own part; `buffers` are what steps use again and again (whole gradients on their way, checkpoints); `activations`
    is everything that came and went, whole parameters that stage 3 gathers among it. `host` are optimizer states that
    lie in the host's memory instead (ZeRO-Offload).
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    host: int

    @property
    def peak(self) -> int:
        """The most that this rank held on its device at any moment of the step."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.activations


class Metered(Protocol):
    """What can be metered: an `Engine`, or what `parallelize` returned."""

    layout: Layout

    def state_bytes(self) -> StateBytes:
        """Bytes of this rank's model states between steps."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes on the device that steps use again and again."""


@dataclass(frozen=True)
class Change:
    """A block of memory was taken (`nbytes` above 0) or given back (below), during the action or operation `scope`."""

    address: int
    nbytes: int
    scope: str


class Recorder:
    """Records, in order, what is taken from torch's allocator for the CPU within a `with`, and what of it comes back.

    Blocks that are older than the recording are not in it. What runs meanwhile takes longer, in proportion to the
    number of its operations. Torch has one profiler for each process: it cannot be in use at the same time.
    """

    def __init__(self) -> None:
        self.changes: tuple[Change, ...] = ()

    def __enter__(self) -> Self:
        # Else torch's tracing library announces every start on stderr; it reads this when it is first used.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = profile(profile_memory=True)
        self._profile.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._profile.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        results = self._profile.kineto_results
        assert results is not None
        self.changes = tuple(_of_recording(results.experimental_event_tree()))
        del self._profile

    @property
    def held(self) -> tuple[int, ...]:
        """Bytes held after each change, beyond what was held before the first."""
        return tuple(accumulate(change.nbytes for change in self.changes))


def _of_recording(events: Sequence[Any]) -> Iterator[Change]:
    """The changes in the order of time, without the ends of blocks whose beginning was not recorded."""
    taken: dict[int, int] = {}
    for _, scope, memory in sorted(_allocations(events, ""), key=lambda found: found[0]):
        if memory.alloc_size > 0:
            taken[memory.ptr] = memory.alloc_size
            yield Change(memory.ptr, memory.alloc_size, scope)
        elif memory.ptr in taken:
            # Torch remembers blocks of earlier recordings that ended unseen, so the size is ours.
            yield Change(memory.ptr, -taken.pop(memory.ptr), scope)


def _allocations(events: Sequence[Any], scope: str) -> Iterator[tuple[int, str, Any]]:
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, scope, event.extra_fields
        yield from _allocations(event.children, scope or event.name)


class Meter:
    """Measures a step: `with meter: engine.step(...)`, then `meter.footprint(engine)`.

    The first step makes optimizer states and buffers; the second is the first that is like all others.
    On a CPU the step takes longer, see `Recorder`. On a GPU the allocator's own peak is reset.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorder = Recorder()
        self._beyond: int | None = None

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._recorder.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            peak, end = torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)
        else:
            self._recorder.__exit__(kind, error, traceback)
            held = (0, *self._recorder.held)
            peak, end = max(held), held[-1]
        self._beyond = peak - end

    def footprint(self, engine: Metered) -> Footprint:
        """What `engine` holds now, and what the step that was measured held beyond it at its peak.

        Raises ValueError if none was measured.
        """
        if self._beyond is None:
            raise ValueError("this meter has measured no step yet: with meter: engine.step(...)")
        return replace(at_rest(engine), activations=self._beyond)


def at_rest(engine: Metered) -> Footprint:
    """What `engine` holds between steps; no activations."""
    states = places(engine.state_bytes(), engine.layout.offload)
    return Footprint(
        parameters=states.device.parameters,
        gradients=states.device.gradients,
        optimizer=states.device.optimizer,
        buffers=engine.buffer_bytes,
        activations=0,
        host=states.host.total,
    )
