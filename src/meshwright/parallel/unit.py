"""ZeRO units: the parameters that are gathered and released together, in one flat buffer cut evenly over the data axis.

Glossary
    unit    the parameters of one block (or one tied parameter), flat: one optimizer group after the other, then padding
    whole   all elements of the unit; exists on every rank while parameters are not sharded, else between gather and
    release shard   this rank's 1/d of the whole, elements [r c, (r+1) c) with c = padded size / d
    owned   the range this rank's optimizer updates: the shard if optimizer states are sharded, else the whole
    master  what the optimizer updates of it: the owned values themselves, or a copy in float32 or on the host
    run     owned elements that the optimizer treats alike

      whole │ group 0: matrices ........... │ 1: biases, norms  │pad│
      shard │   rank 0    │   rank 1    │   rank 2    │   rank 3    │     (d = 4)

Which of parameters, gradients and optimizer states are sharded is read from the ZeRO table (`layout.zero`; ZeRO,
section 5); this module carries the table out and contains no rule of its own. A parameter's life under stage 3 is

      SHARDED ──start_gather──► GATHERING ──settle──► WHOLE ──release──► SHARDED

and under stages 1 and 2 the optimizer's step leaves a unit SHARDED (only its own part is up to date) until it is
gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from meshwright.comm.group import Done, Handle
from meshwright.parallel.absent import AbsentParameter
from meshwright.parallel.flat import Run, Slot, lay_out
from meshwright.parallel.gradient import Gradient
from meshwright.parallel.parameter import DescribedParameter
from meshwright.parallel.pool import GradientPool
from meshwright.parallel.setting import Setting
from meshwright.parallel.whole import PrivateWhole, SharedWhole, Whole

CHUNK = {"cpu": 2**20, "cuda": 2**24}
"""Elements of the longest run: what is widened at once does not grow with the model (C_B; ZeRO, section 6.2)."""


class State(Enum):
    """Where a unit stands between being one shard and being whole."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    WHOLE = "whole"


class Unit:
    """One ZeRO unit on one rank; a frozen one (not `trainable`) has no gradient, and no optimizer updates it.

    All parameters are of the dtype that `setting` computes in. Whole gradients on their way lie in buffers of `pool`.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[DescribedParameter],
        setting: Setting,
        pool: GradientPool,
        trainable: bool = True,
    ) -> None:
        self.name = name
        self.setting = setting
        self.shards = setting.shards
        self.slots = lay_out(parameters, setting.tensor.size)
        self.numel = self.slots[-1].stop if self.slots else 0
        self.shard_numel = -(-self.numel // self.shards.size)
        self.padded = self.shard_numel * self.shards.size
        self.begin = self.shards.index * self.shard_numel
        self.trainable = trainable
        self._make_values()
        self._gradient = Gradient(self.padded, setting, pool) if trainable else None
        self._gathering: Handle = Done()
        self._pointed = False
        self._absent: tuple[AbsentParameter, ...] = ()
        self._place_parameters()

    # --- construction -------------------------------------------------------------------------------------------

    def _make_values(self) -> None:
        """The whole, this rank's shard of it, and the master, all zero; `load` fills them."""
        setting, precision = self.setting, self.setting.precision
        divided = setting.sharding.parameters
        self._whole: Whole = (
            SharedWhole(self.shards, self.padded, precision.compute, setting.device)
            if setting.shared
            else PrivateWhole(setting.gathers, self.padded, precision.compute, setting.device, releases=divided)
        )
        self._writable = self._whole.writable
        own = self._own(self._writable)
        self._shard = own.clone() if divided and not setting.shared else own.zero_()
        # Of a whole that is shared, a rank fills its own part only; a private one is filled whole.
        self.state = State.SHARDED if setting.shared else State.WHOLE
        self.master = self.owned_value
        if self.trainable and setting.separate:
            device = torch.device("cpu") if setting.offload else setting.device
            pin = setting.offload and setting.device.type == "cuda"
            numel = self.owned_value.numel()
            self.master = torch.zeros(numel, dtype=precision.master, device=device, pin_memory=pin)

    def _own(self, whole: Tensor) -> Tensor:
        return whole[self.begin : self.begin + self.shard_numel]

    def _place_parameters(self) -> None:
        """Make every module read its parameter from the flat buffer."""
        self._parameters = tuple(
            nn.Parameter(self._whole.values.data[slot.start : slot.stop].view(slot.shape), requires_grad=self.trainable)
            for slot in self.slots
        )
        self.show()

    def show(self) -> None:
        """Modules read the whole values."""
        # Whoever freezes a parameter meanwhile, or thaws it, does so to what stands for it.
        for (_, parameter), absent in zip(self.parameters(), self._absent, strict=False):
            parameter.requires_grad_(absent.requires_grad)
        for slot, parameter in self.parameters():
            slot.place(parameter)

    def hide(self) -> None:
        """Modules find parameters without values, which refuse to be computed with, until `show`."""
        if not self._absent:
            self._absent = tuple(AbsentParameter.of(slot.name, parameter) for slot, parameter in self.parameters())
        for (slot, parameter), absent in zip(self.parameters(), self._absent, strict=True):
            absent.requires_grad_(parameter.requires_grad)
            slot.place(absent)

    def parameters(self) -> Iterator[tuple[Slot, nn.Parameter]]:
        """Every slot with the parameter that stands for it in the graph."""
        return zip(self.slots, self._parameters, strict=True)

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
        if self.setting.sharding.parameters:
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

    @property
    def storage(self) -> int:
        """The address of the memory that parameters are views of; 0 while it is given back."""
        return self._whole.values.untyped_storage().data_ptr()

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

    def publish(self, part: slice) -> None:
        """The optimizer has updated a part of the master: so are the owned values."""
        if self.setting.separate:
            self.owned_value[part].copy_(self.master[part], non_blocking=True)

    def stepped(self) -> None:
        """The owned values have changed; under stages 1 and 2 the rest of the whole is out of date."""
        self._whole.changed()
        if self.setting.sharding.optimizer and not self.setting.sharding.parameters:
            self._expect(State.WHOLE, "step")
            self.state = State.SHARDED

    def _expect(self, state: State, act: str) -> None:
        if self.state is not state:
            names = ", ".join(slot.name for slot in self.slots)
            raise RuntimeError(f"cannot {act} unit {self.name} ({names}): it is {self.state.value}, not {state.value}")

    # --- gradients -------------------------------------------------------------------------------------------------

    @property
    def gradient(self) -> Gradient:
        """The gradient of a unit that is not frozen."""
        assert self._gradient is not None, f"unit {self.name} is frozen and has no gradient"
        return self._gradient

    def open_gradient(self) -> None:
        """Make a backward pass that is about to begin add straight to the whole gradient."""
        self.finish_reduce()  # its buffer must not take the next micro-batch's gradient
        if not self._pointed:
            whole = self.gradient.open()
            for slot, parameter in self.parameters():
                parameter.grad = whole[slot.start : slot.stop].view(slot.shape)
            self._pointed = True

    def finish_reduce(self) -> None:
        """Wait for the reduction under way; parameters let go of a whole gradient that does not persist."""
        self.gradient.finish_reduce()
        if self._pointed and not self.gradient.is_open:
            self._pointed = False
            for _, parameter in self.parameters():
                parameter.grad = None

    def absorb_gradient(self) -> None:
        """Add to the whole gradient what backward passes have left at the parameters, and take it away from there."""
        whole = self.gradient.open()
        for slot, parameter in self.parameters():
            if parameter.grad is not None:
                whole[slot.start : slot.stop].view(slot.shape).add_(parameter.grad)
                parameter.grad = None

    # --- what this rank's optimizer owns ---------------------------------------------------------------------------

    @property
    def owned_value(self) -> Tensor:
        """The values of the owned range, 1-D."""
        return self._shard if self.setting.sharding.optimizer else self._writable

    @property
    def owned_begin(self) -> int:
        """Where the owned range begins in the whole."""
        return self.begin if self.setting.sharding.optimizer else 0

    def owned_part(self, low: int, high: int) -> slice:
        """Elements [low, high) of the whole as a slice of the owned range (empty if they do not meet)."""
        begin, length = self.owned_begin, self.owned_value.numel()
        start = min(max(low - begin, 0), length)
        return slice(start, max(start, min(high - begin, length)))

    def runs(self) -> tuple[Run, ...]:
        """The owned range without padding, cut where the optimizer group changes, and into chunks."""
        if not self.trainable:
            return ()
        found: list[Run] = []
        for slot in self.slots:
            part = self.owned_part(slot.start, slot.stop)
            if part.start == part.stop:
                continue
            if found and found[-1].group == slot.group:
                found[-1] = Run(found[-1].start, part.stop, slot.group)
            else:
                found.append(Run(part.start, part.stop, slot.group))
        return tuple(piece for run in found for piece in run.cut_at(self._chunks(run.start, run.stop)))

    def unique_gradients(self) -> Iterator[Tensor]:
        """Chunks of the summed gradient that, over all ranks together, cover each unique element of the unit once.

        Of what several ranks hold, each of the data axis counts its own 1/d, and a parameter replicated over the tensor
        axis counts on that axis's rank 0. (Padding is zero, always.)
        """
        if self.setting.replicas.index != 0:
            return
        low, high = self.begin, self.begin + self.shard_numel
        for slot in self.slots:
            if self.setting.tensor.index == 0 or not slot.replicated:
                part = self.owned_part(max(slot.start, low), min(slot.stop, high))
                yield from torch.split(self.gradient.owned[part], CHUNK[self.setting.device.type])

    def replicated_gradients(self) -> Iterator[Tensor]:
        """Chunks of the summed gradient that this rank updates by itself, and that another of the tensor axis counts.

        They should be equal there; but if one of them is not finite, this rank alone knows.
        """
        if self.setting.tensor.index > 0:
            for slot in self.slots:
                if slot.replicated:
                    yield from torch.split(
                        self.gradient.owned[self.owned_part(slot.start, slot.stop)], CHUNK[self.setting.device.type]
                    )

    def first_not_finite(self) -> Slot | None:
        """The first parameter that has a gradient here that is not finite, if there is one."""
        owned = self.gradient.owned
        for slot in self.slots:
            if not bool(owned[self.owned_part(slot.start, slot.stop)].isfinite().all()):
                return slot
        return None

    def _chunks(self, start: int, stop: int) -> range:
        return range(start, stop, CHUNK[self.setting.device.type])

    # --- export --------------------------------------------------------------------------------------------------

    def collect(self, owned: Tensor) -> Tensor:
        """A copy of all that the ranks have for their owned ranges, 1-D with padding; all ranks must call it."""
        if not self.setting.sharding.optimizer:
            return owned.clone()
        owned = owned.to(self.setting.device)
        whole = owned.new_empty(self.padded)
        self.shards.all_gather(owned.contiguous(), whole, label="export")
        return whole

    @property
    def master_bytes(self) -> int:
        """Bytes of the separate master copy, which counts as an optimizer state; 0 without one."""
        return self.master.untyped_storage().nbytes() if self.trainable and self.setting.separate else 0

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Bytes that parameters and gradients take between steps on this rank (the storage itself, measured).

        Of memory that the ranks of a host share, a rank answers for its own part.
        """
        parameters = self._whole.held_bytes
        if self._shard.untyped_storage().data_ptr() != self._writable.untyped_storage().data_ptr():
            parameters += self._shard.untyped_storage().nbytes()
        return parameters, self.gradient.held_bytes if self.trainable else 0
