"""What an operation is, in the few bytes by which the members of a group recognise that they mean the same one.

Each member writes its signature beside its data, and every member compares them before it reads any data; so ranks that
do different things get the same error, which shows all of it, and never garbage.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from meshwright.comm.group import Reduction
from meshwright.comm.ledger import Kind

_KINDS = tuple(Kind)
_REDUCTIONS = tuple(Reduction)
_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_LABEL = 40
_FORM = struct.Struct(f"<QQHBBBxxx{_LABEL}s")

SIZE = _FORM.size
"""Bytes of a signature."""


@dataclass(frozen=True)
class Signature:
    """What must be the same on all members.

    Args:
        kind: what is done.
        label: what for; only its first 40 bytes are compared.
        numel: elements of the whole tensor.
        dtype: of the elements.
        reduction: how they are combined, where they are.
        root: the index of the member they come from, where they come from one.
    """

    kind: Kind
    label: str
    numel: int
    dtype: torch.dtype
    reduction: Reduction = Reduction.SUM
    root: int = 0

    def pack(self, number: int) -> bytes:
        """As the operation `number` of its group."""
        kind, reduction = _KINDS.index(self.kind), _REDUCTIONS.index(self.reduction)
        return _FORM.pack(number, self.numel, self.root, kind, code(self.dtype), reduction, _packed(self.label))

    @classmethod
    def unpack(cls, data: bytes) -> Signature:
        """What a member wrote."""
        _, numel, root, kind, dtype, reduction, label = _FORM.unpack(data)
        text = label.rstrip(b"\0").decode(errors="ignore")
        return cls(_KINDS[kind], text, numel, _DTYPES[dtype], _REDUCTIONS[reduction], root)

    def __str__(self) -> str:
        details = {Kind.ALL_REDUCE: f" ({self.reduction.value})", Kind.BROADCAST: f" (from index {self.root})"}
        return f"{self.kind} of {self.label}{details.get(self.kind, '')}, {elements(self.numel, self.dtype)}"


def elements(numel: int, dtype: torch.dtype) -> str:
    """As in: 12 float32 elements."""
    return f"{numel} {str(dtype).removeprefix('torch.')} elements"


def code(dtype: torch.dtype) -> int:
    """A number for `dtype`. Raises ValueError for one that does not travel."""
    if dtype not in _DTYPES:
        names = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
        raise ValueError(f"{dtype} does not travel between ranks; these do: {names}")
    return _DTYPES.index(dtype)


def dtype_of(number: int) -> torch.dtype:
    """The dtype of a `code`."""
    return _DTYPES[number]


def difference(number: int, ranks: Sequence[int], signatures: Sequence[bytes]) -> str:
    """What the members `ranks` do instead of one thing, as the operation `number` of their group."""
    said: dict[str, list[int]] = {}
    for rank, data in zip(ranks, signatures, strict=True):
        said.setdefault(str(Signature.unpack(data)), []).append(rank)
    lines = (f"\n  rank {', '.join(map(str, each))}: {text}" for text, each in said.items())
    return f"operation {number} is not the same on all ranks:{''.join(lines)}"


@cache
def _packed(label: str) -> bytes:
    return label.encode()[:_LABEL]
