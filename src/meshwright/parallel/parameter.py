"""What a parameter is, whatever the layout: its true shape, its initial value, and how tensor parallelism cuts it.

A `ParameterSpec` describes the whole parameter; `cut` and `join` are the only functions that know how a shard lies in
it. Padding exists only between them: `cut` adds zeros, `join` drops them, so nothing padded is ever saved, counted or
initialised. Layers derive from `Described` and *declare* their parameters; values are put in place later, by the
engine, so a layer may be built on the meta device. ZeRO's sharding over the data axis is not here: it cuts the flat
unit, not the parameter.

    Split(dim=0)              Split(dim=0, blocks=3)
    whole     rank 0  1       whole       rank 0  1
    [a]       [a]             [q0]        [q0]          a fused matrix is cut inside each of its equal blocks,
    [b]       [b]             [q1]        [k0]  [q1]    so that a rank gets the q, k and v of its own heads
    [c]           [c]         [k0]        [v0]  [k1]
                  [0]         [k1]              [v1]
                              [v0] [v1]

Megatron-LM (Shoeybi et al., 2019), section 3. Initial values depend on the seed and the global name alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil
from typing import assert_never

import torch
from torch import Tensor, nn

from meshwright.layout.nearest import nearest_divisors, one_of


@dataclass(frozen=True)
class Split:
    """A dim that is cut over the tensor group, inside each of `blocks` equal blocks (a fused qkv weight has three)."""

    dim: int
    blocks: int = 1


@dataclass(frozen=True)
class Normal:
    """Initial values drawn from a normal distribution around 0."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Initial values that are all the same."""

    value: float


@dataclass(frozen=True)
class Given:
    """Initial values that come with a module that somebody else has made."""


Init = Normal | Constant | Given


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the whole model: `shape` is its true one, without padding.

    Args:
        shape: global shape.
        init: where the initial values come from.
        split: the dim that tensor parallelism cuts; None where every rank of the tensor group holds the whole.
        decay: whether the optimizer's weight decay applies.
    """

    shape: tuple[int, ...]
    init: Init
    split: Split | None = None
    decay: bool = True

    @property
    def numel(self) -> int:
        """Number of true elements."""
        return torch.Size(self.shape).numel()

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Shape of one rank's shard in a tensor group of `size`; a dim that `size` does not divide is padded up.

        Raises:
            ValueError: the dim has several blocks and `size` does not divide them: there is no place for padding.
        """
        if self.split is None:
            return self.shape
        split = self.split
        local = split.blocks * _shard_extent(self.shape, split, size)
        return (*self.shape[: split.dim], local, *self.shape[split.dim + 1 :])


def _shard_extent(shape: tuple[int, ...], split: Split, size: int) -> int:
    """How much of each block one of `size` ranks holds along the split dim, padding included."""
    assert shape[split.dim] % split.blocks == 0, (shape, split)
    block = shape[split.dim] // split.blocks
    if split.blocks > 1 and block % size:
        raise ValueError(
            f"tp={size} does not divide dim {split.dim} of {shape}, {split.blocks} blocks of {block}; "
            f"try {one_of(nearest_divisors(block, size))}"
        )
    return ceil(block / size)


def _in_blocks(x: Tensor, dim: int, blocks: int) -> Tensor:
    """A view of `x` whose `dim` is seen as (blocks, extent of one)."""
    return x.view(*x.shape[:dim], blocks, x.shape[dim] // blocks, *x.shape[dim + 1 :])


def cut(full: Tensor, spec: ParameterSpec, index: int, size: int) -> Tensor:
    """The shard of rank `index` of `size`, of shape `spec.local_shape(size)`; what lies past the end is zero.

    Where the shard is one piece of `full`, it is a view of it.
    """
    assert full.shape == spec.shape, f"{tuple(full.shape)} is not the parameter's true shape {spec.shape}"
    if spec.split is None:
        return full
    dim, blocks = spec.split.dim, spec.split.blocks
    extent = _shard_extent(spec.shape, spec.split, size)
    blocked = _in_blocks(full, dim, blocks)
    begin = min(index * extent, blocked.shape[dim + 1])
    shard = blocked.narrow(dim + 1, begin, min(extent, blocked.shape[dim + 1] - begin))
    missing = extent - shard.shape[dim + 1]
    if missing:
        padding = shard.new_zeros((*shard.shape[: dim + 1], missing, *shard.shape[dim + 2 :]))
        shard = torch.cat([shard, padding], dim + 1)
    return shard.flatten(dim, dim + 1)


def join(parts: Sequence[Tensor], spec: ParameterSpec) -> Tensor:
    """The whole parameter, of shape `spec.shape`, from the shards of all ranks in order; padding is dropped."""
    if spec.split is None:
        return parts[0]
    expected = spec.local_shape(len(parts))
    for part in parts:
        assert part.shape == expected, f"a shard of {tuple(part.shape)} where {expected} was expected"
    dim, blocks = spec.split.dim, spec.split.blocks
    whole = torch.cat([_in_blocks(part, dim, blocks) for part in parts], dim + 1)
    return whole.narrow(dim + 1, 0, spec.shape[dim] // blocks).flatten(dim, dim + 1)


def generator(device: torch.device, *key: object) -> torch.Generator:
    """A generator whose stream is a function of `key` only, the same in every process."""
    return reseed(torch.Generator(device), *key)


def reseed(stream: torch.Generator, *key: object) -> torch.Generator:
    """Start `stream` anew at the place that `key` says."""
    # blake2b because Python's own hash differs from process to process. torch's CPU generator uses 32 bits of the seed.
    digest = blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return stream.manual_seed(int.from_bytes(digest, "little"))


def initial_value(spec: ParameterSpec, name: str, seed: int) -> Tensor:
    """The whole parameter's first value: float32 on the CPU, a function of `seed` and the global `name` only."""
    match spec.init:
        case Normal(std):
            stream = generator(torch.device("cpu"), "initial", seed, name)
            return torch.empty(spec.shape, dtype=torch.float32).normal_(0.0, std, generator=stream)
        case Constant(value):
            return torch.full(spec.shape, value, dtype=torch.float32)
        case Given():
            raise ValueError(f"the initial values of {name} come with its module and not from a seed")
        case _ as unknown:
            assert_never(unknown)


class Described(nn.Module):
    """A module that declares what its parameters are; `specs` maps the attribute's name to its `ParameterSpec`."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: dict[str, ParameterSpec] = {}

    def declare(
        self, name: str, spec: ParameterSpec, group_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Register parameter `name` with its local shape for a tensor group of `group_size`, its values not yet set."""
        self.specs[name] = spec
        local = torch.empty(spec.local_shape(group_size), device=device, dtype=dtype)
        self.register_parameter(name, nn.Parameter(local))


@dataclass(frozen=True)
class DescribedParameter:
    """Where a parameter lives: `owner.attribute` holds this rank's shard of the parameter with the global `name`.

    `group` is the number of its optimizer group: of the layers here, 0 with weight decay and 1 without.
    """

    name: str
    owner: nn.Module
    attribute: str
    spec: ParameterSpec
    group: int

    @property
    def parameter(self) -> nn.Parameter:
        """What stands there now; the engine may put another one in its place."""
        return self.owner.get_parameter(self.attribute)


DECAY_GROUPS = ({"decay": True}, {"decay": False})
"""What tells the two optimizer groups of described layers apart."""


def described(module: nn.Module, prefix: str) -> Iterator[DescribedParameter]:
    """Every parameter in `module`, in the order of declaration, under names that begin with `prefix`."""
    for path, owner in module.named_modules(prefix=prefix):
        specs = owner.specs if isinstance(owner, Described) else {}
        held = [name for name, parameter in owner._parameters.items() if parameter is not None]
        assert held == list(specs), f"{path} holds {held} but describes {list(specs)}"
        for attribute, spec in specs.items():
            yield DescribedParameter(f"{path}.{attribute}", owner, attribute, spec, 0 if spec.decay else 1)
