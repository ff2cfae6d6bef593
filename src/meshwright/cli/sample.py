"""`meshwright sample RUN`: text from a trained model."""

from __future__ import annotations

from pathlib import Path


def sample(run: Path, /, *, prompt: str, tokens: int = 200, temperature: float = 0.8, seed: int = 0) -> int:
    """Continue a text with a trained model.

    Args:
        run: The folder that `meshwright train` wrote.
        prompt: The text to continue.
        tokens: How many tokens to add.
        temperature: 0 takes the likeliest token every time; higher is more varied.
        seed: The same seed continues the same way.
    """
    from meshwright.train import sampling  # torch

    print(sampling.sample(run, prompt, tokens, temperature, seed))
    return 0
