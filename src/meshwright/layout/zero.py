"""The ZeRO table: which model states are divided by the data-parallel degree d (or by the length of an HSDP run).

Rajbhandari et al., 2020, section 5 and table 1. The optimizer reads it to shard and the planner to divide; nothing
else knows what a stage means. It says nothing about activations (ZeRO-R), and not when states are gathered
(`schedule.passes`).

    stage    parameters  gradients  optimizer states      bytes per parameter, mixed-precision Adam
    0        whole       whole      whole                 2 + 2 + 12
    1        whole       whole      / d                   2 + 2 + 12/d
    2        whole       / d        / d                   2 + (2 + 12)/d
    3        / d         / d        / d                   (2 + 2 + 12)/d
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum


class ZeroStage(IntEnum):
    """Which states are divided: those of the stages before it, and the one it is named for."""

    NONE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


@dataclass(frozen=True)
class Sharding:
    """A row of the table: True where a state is divided over the data axis, False where every rank holds it all."""

    parameters: bool
    gradients: bool
    optimizer: bool


def row(stage: ZeroStage) -> Sharding:
    """The row of the table for one stage."""
    return Sharding(
        parameters=stage >= ZeroStage.PARAMETERS,
        gradients=stage >= ZeroStage.GRADIENTS,
        optimizer=stage >= ZeroStage.OPTIMIZER,
    )


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the three model states: per parameter, or of one rank."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of all three."""
        return self.parameters + self.gradients + self.optimizer


MIXED_ADAM = StateBytes(parameters=2, gradients=2, optimizer=12)
"""16-bit weights and gradients; the optimizer holds 32-bit weights, momentum and variance (K = 12 in the paper)."""

FULL_ADAM = StateBytes(parameters=4, gradients=4, optimizer=8)
"""32-bit weights and gradients; the optimizer holds momentum and variance only."""


@dataclass(frozen=True)
class Places:
    """Where the bytes of one rank's model states lie: on its device and in the memory of its host."""

    device: StateBytes
    host: StateBytes


def places(states: StateBytes, offload: bool) -> Places:
    """The states of one rank by where they lie: with offload the optimizer's, masters included, are on the host.

        Adam, bytes per parameter              device      host
        mixed precision, stage 0               2 + 2       12
        mixed precision, stage 2 over d        2 + 2/d     12/d
        float32, stage 0                       4 + 4       12       4 of them a copy of the weights, stepped there

    Parameters and gradients stay where the model computes; the host needs gradients only in passing (ZeRO-Offload, Ren
    et al., 2021, section 4, keeps them there too). A copy of the weights is for the caller to count among `states`.
    """
    if not offload:
        return Places(device=states, host=StateBytes(0, 0, 0))
    return Places(device=replace(states, optimizer=0), host=StateBytes(0, 0, states.optimizer))


def model_state_bytes(parameters: int, shards: int, stage: ZeroStage, per_parameter: StateBytes) -> StateBytes:
    """Bytes that one of `shards` ranks (`Layout.shards`) holds of a model (or unit) of `parameters` elements.

    A divided state is ceil(parameters / shards) elements: elements are not cut, and shards are padded to one length.
    Raises ValueError for fewer than one shard.
    """
    if shards < 1:
        raise ValueError(f"model states cannot be divided over {shards} ranks; take at least 1")
    sharding = row(stage)
    shard = -(-parameters // shards)

    def held(divided: bool, size: int) -> int:
        return (shard if divided else parameters) * size

    return StateBytes(
        parameters=held(sharding.parameters, per_parameter.parameters),
        gradients=held(sharding.gradients, per_parameter.gradients),
        optimizer=held(sharding.optimizer, per_parameter.optimizer),
    )
