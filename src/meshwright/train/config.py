"""The configuration of a training run: one TOML file over frozen values, with settings from the command line on top.

The types of the fields are the schema (`train.records` reads them); what the values mean together is checked here,
once: that the layout parses, that it is legal for the model, and that the micro-batches make up the batch. Never
imports torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from meshwright.costs.spec import GPTSpec
from meshwright.layout.layout import Layout
from meshwright.planner.rules import problems
from meshwright.train.records import (
    ConfigError,
    Key,
    build,
    keys_of,
    settings_of_table,
    settings_of_words,
    to_toml,
)

__all__ = ["Config", "ConfigError", "DataConfig", "OptimizerConfig", "config_keys", "dump", "load"]

BYTES = 256
"""Different tokens of text that is read byte by byte."""


def _key(default: Any, about: str) -> Any:
    """A field with its default and what `train --help` says about it."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True)
class DataConfig:
    """Which text is learned. Raises ValueError if nothing would be left to train on."""

    files: tuple[str, ...] = _key(
        (), "globs of text files, from the working folder; none: Python's own standard library"
    )
    held_out: int = _key(20, "one file in this many is kept for evaluation")
    cache: str | None = _key(None, "folder for the joined text; none: meshwright in the user's cache folder")

    def __post_init__(self) -> None:
        if self.held_out < 2:
            raise ValueError(
                f"held_out={self.held_out} keeps every file from training; the nearest that works is held_out=2"
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up and cosine decay. Raises ValueError for a value outside its range."""

    learning_rate: float = _key(1e-3, "highest learning rate, reached at the end of the warm-up")
    warmup: int = _key(20, "steps in which the learning rate rises from zero")
    final_ratio: float = _key(0.1, "last learning rate as a part of the highest")
    weight_decay: float = _key(0.1, "decay of matrices; norms and biases have none")
    beta1: float = _key(0.9, "how much of the momentum stays at each step")
    beta2: float = _key(0.95, "how much of the variance stays at each step")
    epsilon: float = _key(1e-8, "added to the root of the variance")
    clip: float = _key(1.0, "largest norm of the whole gradient; 0: any")

    def __post_init__(self) -> None:
        for name in ("learning_rate", "epsilon"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be above 0; the default is {name}={getattr(_plain, name)}"
                )
        for name in ("warmup", "weight_decay", "clip"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"{name}={getattr(self, name)} must not be below 0; the nearest that works is {name}=0"
                )
        for name in ("beta1", "beta2", "final_ratio"):
            if not 0 <= getattr(self, name) <= 1 or (name != "final_ratio" and getattr(self, name) == 1):
                raise ValueError(
                    f"{name}={getattr(self, name)} must be between 0 and 1; try {name}={getattr(_plain, name)}"
                )


@dataclass(frozen=True)
class Config:
    """Everything a run is made of; two runs with equal configurations compute the same.

    Raises ValueError for a value outside its range; `load` also checks what the values mean together.
    """

    layout: str = _key("dp1", "how the run is divided, as in dp2.tp2.pp2/zero1/1f1b/m4")
    batch: int = _key(32, "samples of one step, over all ranks")
    micro_batch: int | None = _key(None, "samples of one micro-batch; none: batch / (m x dp)")
    steps: int = _key(300, "updates of the weights")
    seed: int = _key(0, "decides initial weights, order of samples and dropout")
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = _key(
        "float32", "of weights and activations; in 16 bits the optimizer keeps float32 masters"
    )
    reduce_dtype: Literal["same", "float32", "float64"] = _key(
        "same", "in which gradients are summed over ranks; same: as they are computed"
    )
    folder: str = _key("runs/demo", "where to put log, configuration and weights")
    log_every: int = _key(10, "steps between two lines of the log")
    evaluate_every: int = _key(50, "steps between two evaluations on held-out text")
    evaluation_samples: int = _key(64, "samples of one evaluation")
    trace: int = _key(0, "step whose actions on every rank are timed and written to trace.json; 0: none")
    meter: int = _key(2, "step whose memory is measured on every rank, or the last if there are fewer; 0: none")
    timeout: float = _key(60.0, "seconds after which a rank gives up waiting for another")
    transport: Literal["auto", "shared", "gloo"] = _key(
        "auto", "between CPU ranks: shared memory of one host, or gloo; auto: the quickest that works"
    )
    debug: bool = _key(False, "compare every collective over its ranks before it runs, and name what differs")
    label_smoothing: float = _key(0.0, "part of the target spread over the whole vocabulary")
    device: Literal["auto", "cpu", "cuda"] = _key("auto", "where to compute; auto: cuda where there is one")
    model: GPTSpec = field(default_factory=GPTSpec)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        for name in ("batch", "steps", "log_every", "evaluate_every", "evaluation_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1; the nearest that works is {name}=1")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(
                f"micro_batch={self.micro_batch} must be at least 1; the nearest that works is micro_batch=1"
            )
        for name in ("trace", "meter"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is not a step; {name}=0 is none, {name}=1 the first")
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout} seconds must be above 0; the default is timeout=60")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} must be at least 0 and below 1; 0.1 is usual")


_plain = OptimizerConfig()

# A model's description stands below this package and knows nothing of help texts.
_ABOUT_MODEL = {
    "model.layers": "blocks",
    "model.hidden": "width",
    "model.heads": "attention heads",
    "model.sequence": "tokens of one sample",
    "model.vocabulary": "different tokens",
    "model.tied": "the head's projection is the token embedding",
    "model.bias": "biases in linear layers and norms",
    "model.dropout": "probability of dropping an element",
}


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a TOML file with command line `overrides` (`--key value`, `--key=value`) on top.

    Raises ConfigError naming file (or command line), key and the nearest that works.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    words = settings_of_words(overrides, Config, "command line")
    config = build(Config, [*settings_of_table(table, Config, str(path)), *words])
    found = list(_contradictions(config))
    if found:
        source = " ".join([str(path), *(["with", *overrides] if overrides else [])])
        raise ConfigError(f"{source}: this cannot run:" + "".join(f"\n  - {line}" for line in found))
    return config


def dump(config: Config) -> str:
    """The configuration as TOML, every key written out; `load` reads it back equal."""
    return to_toml(config)


def config_keys() -> tuple[Key, ...]:
    """Every key with its type, default and meaning, as `train --help` lists them."""
    return tuple(replace(key, about=key.about or _ABOUT_MODEL[key.name]) for key in keys_of(Config))


def _contradictions(config: Config) -> Iterator[str]:
    """What is wrong with the values taken together, all of it, each with what would work."""
    try:
        layout = Layout.parse(config.layout)
    except ValueError as error:
        yield str(error)
        return
    yield from map(str, problems(layout, config.model, config.batch))
    yield from _micro_batches(config, layout)
    if config.dtype == "float64" and config.reduce_dtype == "float32":
        yield "reduce_dtype=float32 cannot hold gradients in float64; try reduce_dtype=same"
    if config.model.vocabulary < BYTES:
        yield f"model.vocabulary={config.model.vocabulary} has no place for {BYTES} bytes; try model.vocabulary={BYTES}"


def _micro_batches(config: Config, layout: Layout) -> Iterator[str]:
    """The equation that a given micro-batch must fulfil, with all its terms."""
    size, m, d = config.micro_batch, layout.micro_batches, layout.data
    if size is None or config.batch == size * m * d:
        return
    remedies = [f"set batch = {size * m * d}"]
    if config.batch % (size * d) == 0:
        remedies.append(f"m{config.batch // (size * d)}")
    if config.batch % (m * d) == 0:
        remedies.append(f"micro_batch = {config.batch // (m * d)}")
    yield f"{config.batch} != {size} x {m} x {d} (micro_batch x m x dp); {', or '.join(remedies)}"
