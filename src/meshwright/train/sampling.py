"""Text from a trained model: the whole model in one process, one token after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.comm.group import SoloGroup
from meshwright.costs.spec import GPTSpec
from meshwright.model.batch import MicroBatch
from meshwright.model.gpt import Head, build_layer, parameters_of
from meshwright.train.config import load
from meshwright.train.weights import load_weights

CONFIG = "config.toml"


def sample(run: Path, prompt: str, tokens: int = 200, temperature: float = 0.8, seed: int = 0) -> str:
    """`prompt` and `tokens` bytes that the model trained in the folder `run` continues it with.

    A `temperature` of 0 takes the most likely byte every time. The same seed gives the same text.

    Raises:
        ValueError: there is no trained model in `run`, the model's tokens are not bytes, or a number is out of range.
    """
    if tokens < 0 or temperature < 0:
        raise ValueError(f"tokens={tokens} and temperature={temperature} must not be negative")
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run} is not a run folder ({CONFIG} is missing)")
    spec = load(run / CONFIG, ()).model
    layers = whole_model(spec, load_weights(run))
    text = list(prompt.encode()) or [ord("\n")]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        text.append(_next(layers, spec, text, temperature, generator))
    return bytes(text).decode(errors="replace")


def whole_model(spec: GPTSpec, weights: Mapping[str, Tensor]) -> Sequence[nn.Module]:
    """Every layer of the model in this process, with `weights` by global name.

    Raises:
        ValueError: a weight is missing or has another shape than the model's.
    """
    solo = SoloGroup("tensor")
    layers = [build_layer(spec, index, solo, torch.device("cpu"), torch.float32) for index in range(spec.layers + 2)]
    for index, layer in enumerate(layers):
        for entry in parameters_of(spec, index, layer):
            value = weights.get(entry.name)
            if value is None or value.shape != entry.spec.shape:
                found = "is missing" if value is None else f"has shape {tuple(value.shape)}"
                raise ValueError(f"weight {entry.name} {found}; the model's is {entry.spec.shape}")
            entry.parameter.data = value.to(torch.float32)
    return layers


@torch.no_grad()
def _next(
    layers: Sequence[nn.Module], spec: GPTSpec, text: list[int], temperature: float, generator: torch.Generator
) -> int:
    context = torch.tensor([text[-spec.sequence :]])
    batch = MicroBatch(context, context)
    x = context
    for layer in layers[:-1]:
        x = layer(x, batch)
    head = layers[-1]
    assert isinstance(head, Head)
    logits = head.logits(x[:, -1:])[0, 0]
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
