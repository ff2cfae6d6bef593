"""The trained weights on disk: safetensors under global names, one file per layer, and an index.

    weights/embedding.safetensors
    weights/blocks.0.safetensors ...
    weights/head.safetensors
    weights/model.safetensors.index.json      {"weight_map": {"blocks.0.norm1.weight": "blocks.0.safetensors", ...}}

The files hold whole parameters without padding, a tied one once, so they are the same whatever layout trained them.
They appear all at once: written into a folder beside, which is then renamed. (Resumable checkpoints are another thing.)
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.engine.engine import Engine

FOLDER = "weights"
INDEX = "model.safetensors.index.json"


def layer_of(name: str) -> str:
    """The layer that a global parameter name belongs to: "blocks.3.mlp.up.weight" -> "blocks.3"."""
    parts = name.split(".")
    return ".".join(parts[:2] if parts[0] == "blocks" else parts[:1])


def save_weights(engine: Engine, run: Path) -> Path:
    """Write the whole model's weights below `run` and return their folder; every rank must call this.

    One rank of each pipeline stage writes that stage's layers; rank 0 writes the index and makes the folder visible.
    """
    groups = engine.groups
    target, partial = run / FOLDER, run / f"{FOLDER}.partial"
    if groups.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    groups.world.barrier()
    files: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for tensor in engine.global_tensors():
        files[layer_of(tensor.name)][tensor.name] = tensor.value.cpu().contiguous()
    if groups.data.index == 0 and groups.tensor.index == 0:
        for layer, tensors in files.items():
            save_file(tensors, partial / f"{layer}.safetensors")
    groups.world.barrier()
    if groups.rank == 0:
        _write_index(partial)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
    groups.world.barrier()  # no rank returns before the folder has its final name
    return target


def _write_index(folder: Path) -> None:
    weight_map: dict[str, str] = {}
    size = 0
    for file in sorted(folder.glob("*.safetensors")):
        size += file.stat().st_size
        with safe_open(file, framework="pt") as opened:
            weight_map |= dict.fromkeys(opened.keys(), file.name)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def load_weights(run: Path) -> Mapping[str, Tensor]:
    """All weights that `save_weights` wrote below `run`, by global name.

    Raises:
        ValueError: there are none, or the index names a file outside its folder.
    """
    folder = run / FOLDER
    if not (folder / INDEX).is_file():
        raise ValueError(
            f"{run} holds no trained weights ({FOLDER}/{INDEX} is missing); `meshwright train` writes them"
        )
    names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    weights: dict[str, Tensor] = {}
    for name in sorted(names):
        if Path(name).name != name:
            raise ValueError(f"{folder / INDEX} names the file {name!r}, which is not a plain name in that folder")
        weights |= load_file(folder / name)
    return weights
