"""What a module has in place of a parameter whose values are divided among the ranks (stage 3, between uses).

It has the shape, the dtype and the name; to compute with it is an error that says what to do, instead of a crash in
memory that was given back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_KNOWN = {"size", "numel", "dim", "stride", "element_size", "is_floating_point", "is_complex", "requires_grad_"}
_UNKNOWN_ATTRIBUTES = {"data", "T", "mT", "H", "mH", "real", "imag"}


class AbsentParameter(nn.Parameter):
    """Stands for `name`, of which this rank holds a shard only."""

    title: str

    @classmethod
    def of(cls, name: str, parameter: Tensor) -> AbsentParameter:
        """Takes the place of `parameter`."""
        meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        absent = cls(meta, requires_grad=parameter.requires_grad)
        absent.title = name
        return absent

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AbsentParameter({self.title}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what is known without the values."""
        if func.__name__ in ("__get__", "__set__"):
            allowed = getattr(getattr(func, "__self__", None), "__name__", "") not in _UNKNOWN_ATTRIBUTES
        else:
            allowed = func.__name__ in _KNOWN
        if allowed:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = next((arg.title for arg in args if isinstance(arg, cls)), "a parameter")
        raise RuntimeError(
            f"{name} is divided among the ranks and was read outside of a call of its block ({func.__name__}); where "
            "another module reads it without calling its own, make one block of both (units=...); to look at it, use "
            "`with model.whole()`, or `model.state_dict()` of what `parallelize` returned"
        )
