"""`meshwright verify LAYOUT`: proves that a layout computes what one process computes."""

from __future__ import annotations

from meshwright.cli.outcome import exit_code


def verify(layout: str, /, *, steps: int = 3) -> int:
    """Prove that a layout computes what one process computes.

    Args:
        layout: As in dp2.tp2.pp2/zero1/1f1b/m4.
        steps: Updates after which the weights are compared.
    """
    if steps < 1:
        raise ValueError(f"--steps {steps} leaves nothing to compare; the nearest that works is --steps 1")
    from meshwright.train.verify import verify as run  # torch

    return exit_code(lambda: run(layout, steps))
