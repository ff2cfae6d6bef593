"""ZeRO units: the parameters that are gathered and released together, in one flat buffer cut evenly over the data axis.

Glossary
    unit    the parameters of one block (or one tied parameter), flat: decayed ones first, then the rest, then padding
    whole   all elements of the unit; exists on every rank while parameters are not sharded, else between gather and
    release shard   this rank's 1/d of the whole, elements [r c, (r+1) c) with c = padded size / d
    owned   the range this rank's optimizer updates: the shard if optimizer states are sharded, else the whole

      whole │ decayed matrices ............ │ biases, norms ... │pad│
      shard │   rank 0    │   rank 1    │   rank 2    │   rank 3    │     (d = 4)

Which of parameters, gradients and optimizer states are sharded is read from the ZeRO table (`layout.zero`; ZeRO,
section 5); this module carries the table out and contains no rule of its own. A parameter's life under stage 3 is

      SHARDED ──start_gather──► GATHERING ──settle──► WHOLE ──release──► SHARDED

and under stages 1 and 2 the optimizer's step leaves a unit SHARDED (only its own part is up to date) until it is
gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from meshwright.comm.group import Done, Group, Handle
from meshwright.layout.zero import Sharding
from meshwright.parallel.flat import Piece, Slot, lay_out
from meshwright.parallel.parameter import DescribedParameter
from meshwright.parallel.pool import GradientPool
from meshwright.parallel.precision import Precision
from meshwright.parallel.whole import PrivateWhole, SharedWhole, Whole


class State(Enum):
    """Where a unit stands between being one shard and being whole."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    WHOLE = "whole"


@dataclass(frozen=True)
class Setting:
    """What all units of one stage have in common: this rank's groups, the row of the ZeRO table, dtypes, the device."""

    data: Group
    tensor: Group
    sharding: Sharding
    precision: Precision
    device: torch.device

    @property
    def shared(self) -> bool:
        """Whether whole values exist once for all data ranks."""
        return self.sharding.optimizer and self.data.shares_memory


class Unit:
    """One ZeRO unit on one rank. Whole gradients on their way lie in buffers of `pool`."""

    def __init__(
        self, name: str, parameters: Sequence[DescribedParameter], setting: Setting, pool: GradientPool
    ) -> None:
        self.name = name
        self.data = setting.data
        self.tensor = setting.tensor
        self.sharding = setting.sharding
        self.precision = setting.precision
        self.slots = lay_out(parameters, setting.tensor.size)
        self.numel = self.slots[-1].stop if self.slots else 0
        self.shard_numel = -(-self.numel // self.data.size)
        self.padded = self.shard_numel * self.data.size
        self.begin = self.data.index * self.shard_numel
        self._make_values(setting)
        self._make_gradient(setting)
        self._pool = pool
        self._buffer: Tensor | None = None
        self._gathering: Handle = Done()
        self._reducing: Handle | None = None
        self._place_parameters()

    # --- construction -------------------------------------------------------------------------------------------

    def _make_values(self, setting: Setting) -> None:
        """The whole, this rank's shard of it, and the master, all zero; `load` fills them."""
        sharding, precision, device = setting.sharding, setting.precision, setting.device
        self._whole: Whole = (
            SharedWhole(self.data, self.padded, precision.compute, device)
            if setting.shared
            else PrivateWhole(self.data, self.padded, precision.compute, device, releases=sharding.parameters)
        )
        self._writable = self._whole.writable
        own = self._own(self._writable)
        self._shard = own.clone() if sharding.parameters and not setting.shared else own.zero_()
        # Of a whole that is shared, a rank fills its own part only; a private one is filled whole.
        self.state = State.SHARDED if setting.shared else State.WHOLE
        # What the optimizer updates: a copy in higher precision, or the owned values themselves.
        self.master = self.owned_value
        if precision.mixed:
            self.master = torch.zeros(self.owned_value.numel(), dtype=precision.master, device=device)

    def _make_gradient(self, setting: Setting) -> None:
        """What persists between backward passes: this rank's shard of the sum, or the whole gradient."""
        dtype, device = setting.precision.compute, setting.device
        self._open: Tensor | None = None
        if setting.sharding.gradients:
            self._gradient = torch.zeros(self.shard_numel, dtype=dtype, device=device)
        else:
            self._gradient = self._open = self.data.buffer(self.padded, dtype, device).zero_()

    def _own(self, whole: Tensor) -> Tensor:
        return whole[self.begin : self.begin + self.shard_numel]

    def _place_parameters(self) -> None:
        """Make every module read its parameter from the flat buffer (and, if they persist, its gradient too)."""
        for slot in self.slots:
            parameter = nn.Parameter(self._whole.values.data[slot.start : slot.stop].view(slot.shape))
            for owner, attribute in slot.places:
                owner.register_parameter(attribute, parameter)
        if self._open is not None:
            self._point_gradients(self._open)

    def _parameters(self) -> Iterator[tuple[Slot, Tensor]]:
        for slot in self.slots:
            owner, attribute = slot.places[0]
            yield slot, getattr(owner, attribute)

    def _point_gradients(self, whole: Tensor | None) -> None:
        for slot, parameter in self._parameters():
            parameter.grad = None if whole is None else whole[slot.start : slot.stop].view(slot.shape)

    def load(self, name: str, value: Tensor) -> None:
        """Set the parameter `name` from its local (tensor-parallel) value, on whatever part of it this rank holds."""
        slot = self.slot(name)
        flat = value.reshape(-1)
        if self.state is State.WHOLE:
            self._writable[slot.start : slot.stop].copy_(flat)
        for target, begin in ((self._shard, self.begin), (self.master, self.owned_begin)):
            low, high = max(slot.start, begin), min(slot.stop, begin + target.numel())
            if low < high:
                target[low - begin : high - begin].copy_(flat[low - slot.start : high - slot.start])
        self._whole.changed()

    def rest(self) -> None:
        """Bring a loaded unit to how it stands between steps; every rank of the data axis must call it."""
        if self.sharding.parameters:
            if self.state is State.WHOLE:
                self.release()
        elif self.state is State.SHARDED:
            self.start_gather()
            self.settle()

    def slot(self, name: str) -> Slot:
        """The place of the parameter with that global name."""
        for slot in self.slots:
            if slot.name == name:
                return slot
        raise KeyError(f"unit {self.name} holds no parameter {name}")

    # --- parameters: whole and sharded ---------------------------------------------------------------------------

    def start_gather(self) -> None:
        """SHARDED -> GATHERING: begin to make the unit whole (ZeRO, section 5.3; after the step in stages 1 and 2)."""
        self._expect(State.SHARDED, "gather")
        self._gathering = self._whole.start_gather(self._shard)
        self.state = State.GATHERING

    def settle(self) -> None:
        """GATHERING -> WHOLE, waiting for the gather; nothing to do if none is under way."""
        if self.state is State.GATHERING:
            self._gathering.wait()
            self.state = State.WHOLE

    def whole(self) -> None:
        """Return when the unit is whole and may be used."""
        self.settle()
        self._expect(State.WHOLE, "use")

    def release(self) -> None:
        """WHOLE -> SHARDED: give the memory of the whole back (stage 3)."""
        self._expect(State.WHOLE, "release")
        self.state = State.SHARDED
        self._whole.release()

    def stepped(self) -> None:
        """The master has changed: so has the owned range; under stages 1 and 2 the rest of the whole is out of date."""
        if self.precision.mixed:
            self.owned_value.copy_(self.master)
        self._whole.changed()
        if self.sharding.optimizer and not self.sharding.parameters:
            self._expect(State.WHOLE, "step")
            self.state = State.SHARDED

    def _expect(self, state: State, act: str) -> None:
        if self.state is not state:
            names = ", ".join(slot.name for slot in self.slots)
            raise RuntimeError(f"cannot {act} unit {self.name} ({names}): it is {self.state.value}, not {state.value}")

    # --- gradients -------------------------------------------------------------------------------------------------

    def open_gradient(self) -> None:
        """Make room for the whole gradient of a backward pass that is about to begin, where it does not persist."""
        self.finish_reduce()  # its buffer must not take the next micro-batch's gradient
        if self._open is None:
            self._buffer = self._pool.take()
            self._open = self._buffer[: self.padded].zero_()
            self._point_gradients(self._open)

    def start_reduce(self) -> None:
        """Begin to sum the gradient over the data axis: all of it in stage 0, else each rank's shard of it.

        Stages 2 and 3 add the sum to the sharded gradient and give the whole one back when the reduction has ended.
        """
        assert self._open is not None, f"unit {self.name}: no backward pass has left a gradient to reduce"
        if self.sharding.optimizer:
            self._reducing = self.data.start_reduce_scatter(self._open, self._own(self._open), label="gradients")
        else:
            self._reducing = self.data.start_all_reduce(self._open, label="gradients")

    def finish_reduce(self) -> None:
        """Wait for the reduction under way, if any; afterwards `owned_gradient` is the sum."""
        if self._reducing is None:
            return
        self._reducing.wait()
        self._reducing = None
        if self.sharding.gradients:
            assert self._open is not None and self._buffer is not None
            self._gradient.add_(self._own(self._open))
            self._open = None
            self._point_gradients(None)
            self._pool.give(self._buffer)

    def clear_gradient(self) -> None:
        """Start the next step's sum at zero."""
        self._gradient.zero_()

    # --- what this rank's optimizer owns ---------------------------------------------------------------------------

    @property
    def owned_gradient(self) -> Tensor:
        """The summed gradient of the owned range, 1-D."""
        if self.sharding.gradients or not self.sharding.optimizer:
            return self._gradient
        return self._own(self._gradient)

    @property
    def owned_value(self) -> Tensor:
        """The values of the owned range, 1-D, in the same order."""
        return self._shard if self.sharding.optimizer else self._writable

    @property
    def owned_begin(self) -> int:
        """Where the owned range begins in the whole."""
        return self.begin if self.sharding.optimizer else 0

    def pieces(self) -> tuple[Piece, ...]:
        """The master as at most two runs: what weight decay applies to and what it does not; padding left out."""
        border = max((slot.stop for slot in self.slots if slot.spec.decay), default=0)
        runs = []
        for low, high, decay in ((0, border, True), (border, self.numel, False)):
            part = self._owned_part(low, high)
            if part.stop > part.start:
                runs.append(Piece(self.master[part], self.owned_gradient[part], decay))
        return tuple(runs)

    def unique_gradients(self) -> tuple[Tensor, ...]:
        """Runs of the owned gradient that, over the data and tensor axes together, cover each unique element once.

        A parameter replicated over the tensor axis is counted by that axis's rank 0, and a gradient that every data
        rank owns by data rank 0. (Padding is zero, always.)
        """
        if not self.sharding.optimizer and self.data.index != 0:
            return ()
        runs = (
            self._owned_part(slot.start, slot.stop)
            for slot in self.slots
            if self.tensor.index == 0 or not slot.replicated
        )
        return tuple(self.owned_gradient[part] for part in runs if part.stop > part.start)

    def _owned_part(self, low: int, high: int) -> slice:
        """Elements [low, high) of the whole as a slice of the owned range (empty if they do not meet)."""
        begin, length = self.owned_begin, self.owned_value.numel()
        start = min(max(low - begin, 0), length)
        return slice(start, max(start, min(high - begin, length)))

    # --- export --------------------------------------------------------------------------------------------------

    def gathered(self, gradient: bool = False) -> Tensor:
        """A copy of the whole values (or summed gradients), 1-D with padding; all of the data axis must call it."""
        owned = self.owned_gradient if gradient else self.owned_value
        if not self.sharding.optimizer:
            return owned.clone()
        whole = torch.empty(self.padded, dtype=owned.dtype, device=owned.device)
        self.data.all_gather(owned.contiguous(), whole, label="export")
        return whole

    @property
    def master_bytes(self) -> int:
        """Bytes of the separate master copy, which counts as an optimizer state; 0 without one."""
        return self.master.untyped_storage().nbytes() if self.precision.mixed else 0

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Bytes that parameters and gradients take between steps on this rank (the storage itself, measured).

        Of memory that the ranks of a host share, a rank answers for its own part.
        """
        parameters = self._whole.held_bytes
        if self._shard.untyped_storage().data_ptr() != self._writable.untyped_storage().data_ptr():
            parameters += self._shard.untyped_storage().nbytes()
        return parameters, self._gradient.numel() * self._gradient.element_size()
