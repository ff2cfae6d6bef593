"""`meshwright show LAYOUT`: what a layout means, drawn; answers at once and never imports torch."""

from __future__ import annotations

from meshwright.layout.layout import Layout
from meshwright.report import text


def show(layout: str, /, *, rank: int = 0, layers: int = 1) -> int:
    """Draw a layout: mesh, schedule, and the program of a rank.

    Args:
        layout: As in dp2.tp2.pp4/zero1/1f1b/m8; what is left out has its default.
        rank: Whose program to show.
        layers: Layers on each stage of that program.
    """
    if layers < 1:
        raise ValueError(f"--layers {layers} leaves the stages empty; the nearest that works is --layers 1")
    print(text.show(Layout.parse(layout), rank, layers))
    return 0
