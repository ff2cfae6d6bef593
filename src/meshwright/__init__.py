"""Trains a model over data x tensor x pipeline parallel ranks with ZeRO, and says beforehand what that will cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.engine.parallel import LossSum, Parallel
    from meshwright.engine.parallelize import parallelize

__version__ = "0.1.0"

__all__ = ["LossSum", "Parallel", "parallelize"]

_HOMES = {
    "LossSum": "meshwright.engine.parallel",
    "Parallel": "meshwright.engine.parallel",
    "parallelize": "meshwright.engine.parallelize",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for, and with it torch, which planning and showing do without."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
