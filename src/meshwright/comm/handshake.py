"""The agreement before the first step: every rank states what it is about to run, and all compare.

Ranks that disagree (another configuration file, another version of a library, another model) would otherwise train
garbage or stop inside a collective of mismatched sizes. The statements travel through the store, not through a
collective, because a collective is just what such ranks cannot be trusted with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from meshwright.comm.group import CommunicationError


def agree(store: dist.Store, rank: int, ranks: int, statement: Mapping[str, str], timeout: float) -> None:
    """Return when all `ranks` stated the same; raise ValueError on each of them naming every difference from rank 0.

    Raises:
        CommunicationError: a rank did not state anything within `timeout` seconds.
    """
    store.set(f"statement/{rank}", json.dumps(dict(statement)))
    if rank == 0:
        store.set("verdict", _verdict(store, ranks, statement, timeout))
    try:
        # Twice the time: rank 0 may itself use all of `timeout` to find out who is missing.
        store.wait(["verdict"], timedelta(seconds=2 * timeout))
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {rank}: no verdict on the start-up handshake from rank 0 in {2 * timeout:.0f} s"
        ) from error
    verdict = store.get("verdict").decode()
    if verdict.startswith("missing"):
        raise CommunicationError(f"start-up handshake: {verdict}")
    if verdict:
        raise ValueError(f"the ranks do not agree on what to run:\n{verdict}")


def _verdict(store: dist.Store, ranks: int, own: Mapping[str, str], timeout: float) -> str:
    """An empty text when all agree, otherwise one line per difference."""
    keys = [f"statement/{rank}" for rank in range(ranks)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError:
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return f"missing after {timeout:g} s: ranks {absent}"
    lines: list[str] = []
    for rank, key in enumerate(keys):
        other: dict[str, str] = json.loads(store.get(key))
        lines += [
            f"  {name}: {own.get(name, '(not stated)')} on rank 0, {other.get(name, '(not stated)')} on rank {rank}"
            for name in sorted(own.keys() | other.keys())
            if own.get(name) != other.get(name)
        ]
    return "\n".join(lines)
