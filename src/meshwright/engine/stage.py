"""One pipeline rank's part of the model: the layers of its stages and the ZeRO units they read.

A layer is computed and differentiated on its own: its input is cut off from the graph before it, and the gradient is
handed from one layer to the one below, as between pipeline stages. So the program decides what happens between two
layers (a gather, a reduction, a recomputation), and no hooks are needed.

       x ──► layer 3 ──► y = x' ──► layer 4 ──► y'          forward: (x, y), (x', y') are kept
      dx ◄── layer 3 ◄─────── dx' ◄─ layer 4 ◄── dy'        backward: dy' in, dx out, and the kept pair is dropped
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor, nn

from meshwright.model.batch import MicroBatch
from meshwright.parallel.residual import Kept, Store
from meshwright.parallel.unit import Unit
from meshwright.schedule.cut import Cut


class Keep(Enum):
    """What a forward pass leaves behind: nothing (evaluation), its input (to recompute from), or its graph."""

    NOTHING = auto()
    INPUT = auto()
    GRAPH = auto()


@dataclass
class Flight:
    """The micro-batches of one step on one rank: what each was given, where it stands, and what backward still needs.

    Keys are micro-batches, or (micro-batch, layer). Empty again when the step is over.
    """

    batches: Sequence[MicroBatch]
    loss_scale: Tensor
    loss_sum: Tensor
    activation: dict[int, Tensor] = field(default_factory=dict)
    gradient: dict[int, Tensor] = field(default_factory=dict)
    inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    kept: dict[tuple[int, int], Kept] = field(default_factory=dict)


class Stage:
    """Layers by their index in the whole model, the units they read, and how to run one of them on one micro-batch.

    What travels between layers is (b, s, `width`) of `dtype`; inputs that are recomputed from wait in `store`.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        units: Mapping[str, Unit],
        cut: Cut,
        width: int,
        dtype: torch.dtype,
        store: Store,
    ) -> None:
        self.layers = layers
        self.units = units
        self.cut = cut
        self.width = width
        self.dtype = dtype
        self.store = store
        self._last = cut.bounds[-1] - 1
        self._kept = sorted(layer for layer in layers if layer > 0)

    def empty_activation(self, batch: MicroBatch) -> Tensor:
        """Room for what arrives from another stage for this micro-batch: an activation, or its gradient."""
        return torch.empty((*batch.tokens.shape, self.width), dtype=self.dtype, device=batch.tokens.device)

    def forward(self, flight: Flight, micro_batch: int, layer: int, keep: Keep) -> None:
        """Carry the micro-batch's activation through `layer`, leaving behind what `keep` says."""
        activation = flight.batches[micro_batch].tokens if layer == 0 else flight.activation.pop(micro_batch)
        graph = keep is Keep.GRAPH
        if graph:
            activation = self._cut_off(activation)
            flight.inputs[micro_batch, layer] = activation
        elif keep is Keep.INPUT and layer > 0:  # tokens stay with their batch
            if layer == self._kept[0]:
                self.store.reserve(activation, len(self._kept))
            flight.kept[micro_batch, layer] = self.store.keep(activation)
        with torch.set_grad_enabled(graph):
            output: Tensor = self.layers[layer](activation, flight.batches[micro_batch])
        if graph:
            flight.outputs[micro_batch, layer] = output
        if layer == self._last:
            flight.loss_sum += output.detach()
        else:
            flight.activation[micro_batch] = output.detach()

    def recompute(self, flight: Flight, micro_batch: int, layer: int) -> None:
        """Run `layer` again from its kept input, now with a graph; dropout depends on position only and is the same."""
        batch = flight.batches[micro_batch]
        activation = self._cut_off(batch.tokens if layer == 0 else flight.kept[micro_batch, layer].restore())
        flight.inputs[micro_batch, layer] = activation
        with torch.enable_grad():
            flight.outputs[micro_batch, layer] = self.layers[layer](activation, batch)

    def backward(self, flight: Flight, micro_batch: int, layer: int) -> None:
        """Add to the gradients of `layer`'s units, and carry the gradient of the activation down through it."""
        for unit in self.cut.units(layer):
            self.units[unit].open_gradient()
        output = flight.outputs.pop((micro_batch, layer))
        activation = flight.inputs.pop((micro_batch, layer))
        last = layer == self._last
        seed = flight.loss_scale.to(output.dtype) if last else flight.gradient.pop(micro_batch)
        torch.autograd.backward([output], [seed])
        if activation.grad is not None:
            flight.gradient[micro_batch] = activation.grad
        if (micro_batch, layer) in flight.kept:
            flight.kept.pop((micro_batch, layer)).release()

    @property
    def buffer_bytes(self) -> int:
        """Bytes on the device that steps use again and again: whole gradients on their way, and checkpoints."""
        pools = {unit.gradient.pool for unit in self.units.values() if unit.trainable}
        return self.store.reserved + sum(pool.held_bytes for pool in pools)

    @staticmethod
    def _cut_off(activation: Tensor) -> Tensor:
        """The same values as the leaf of a new graph (token numbers have no gradient)."""
        return activation.detach().requires_grad_(activation.is_floating_point())
