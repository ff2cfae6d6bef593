"""What one process knows before it has spoken to any other: its rank, how many there are, and where they meet.

A value, read from our own launcher, from torchrun's variables or from SLURM's; not the connection itself, which is
`connect`. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")

# Below the range from which Linux takes ports for outgoing connections (32768 and up), so that none of those is in
# the way.
_FIRST_PORT, _PORTS = 10_000, 20_000

# A comma inside brackets separates numbers, one outside them hosts.
_HOST = r"(?:[^\[\],\s]|\[\d[\d,-]*\])+"


@dataclass(frozen=True)
class Start:
    """One process's place among all that were started.

    Args:
        rank: which of `ranks` processes this one is.
        ranks: how many were started on all machines.
        local_rank: which of `local_ranks` on this machine this one is.
        local_ranks: how many were started on this machine.
        rendezvous: where they meet: "file:///path" on one machine, "tcp://host:port" across machines.
        attempt: how often the ranks were started again after a failure.
        agent_store: whether the launcher serves the store at `rendezvous` (torchrun does); otherwise rank 0 must.
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    rendezvous: str
    attempt: int
    agent_store: bool

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.ranks and 0 <= self.local_rank < self.local_ranks <= self.ranks, self

    @staticmethod
    def from_environment(env: Mapping[str, str]) -> Start | None:
        """The place that torchrun or SLURM's `srun` gave this process; None if neither started it.

        Raises ValueError naming the variables that are missing, unreadable or contradict each other.
        """
        if any(name in env for name in _TORCHRUN[:4]):
            return _from_torchrun(env)
        if _SLURM[0] in env:
            return _from_slurm(env)
        return None


@dataclass(frozen=True)
class _Number:
    """A number and the variable it was read from, so that an error can name it."""

    name: str
    value: int

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


def _from_torchrun(env: Mapping[str, str]) -> Start:
    _require(env, _TORCHRUN, "torchrun")
    rank, ranks, local_rank, local_ranks = (_number(env, name) for name in _TORCHRUN[:4])
    _check_places(rank, ranks, local_rank, local_ranks)
    return Start(
        rank=rank.value,
        ranks=ranks.value,
        local_rank=local_rank.value,
        local_ranks=local_ranks.value,
        rendezvous=_address(env["MASTER_ADDR"], _port(env)),
        attempt=_number(env, "TORCHELASTIC_RESTART_COUNT", "0").value,
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_slurm(env: Mapping[str, str]) -> Start:
    _require(env, _SLURM, "SLURM")
    rank, ranks, local_rank = (_number(env, name) for name in _SLURM)
    local_ranks = _tasks_on_this_node(env, rank, ranks)
    _check_places(rank, ranks, local_rank, local_ranks)
    return Start(
        rank=rank.value,
        ranks=ranks.value,
        local_rank=local_rank.value,
        local_ranks=local_ranks.value,
        rendezvous=_address(_meeting_host(env), _port(env)),
        attempt=_number(env, "SLURM_RESTART_COUNT", "0").value,
        agent_store=False,
    )


def _tasks_on_this_node(env: Mapping[str, str], rank: _Number, ranks: _Number) -> _Number:
    """How many ranks this machine has.

    The list of tasks per node is exact even where the last node has fewer, so it is read before the single number; a
    step (one `srun`) may be smaller than the job, so the step's list is read first.
    """
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in env:
            tasks = _expand_counts(name, env[name])
            if sum(tasks) != ranks.value:
                raise ValueError(f"{name}={env[name]} makes {sum(tasks)} tasks, but {ranks}")
            return _Number(name, tasks[_node(env, tasks, rank)])
    if "SLURM_NTASKS_PER_NODE" in env:
        each = _number(env, "SLURM_NTASKS_PER_NODE")
        return _Number(each.name, min(each.value, ranks.value))
    raise ValueError(
        "SLURM's variables are incomplete: neither SLURM_NTASKS_PER_NODE nor SLURM_TASKS_PER_NODE is there"
    )


def _node(env: Mapping[str, str], tasks: tuple[int, ...], rank: _Number) -> int:
    """Which node of the list this process is on; without SLURM_NODEID, as SLURM's block distribution fills them."""
    if "SLURM_NODEID" in env:
        node = _number(env, "SLURM_NODEID")
        if not 0 <= node.value < len(tasks):
            raise ValueError(f"{node}, but the tasks stand on {len(tasks)} nodes")
        return node.value
    return next((node for node, below in enumerate(accumulate(tasks)) if rank.value < below), len(tasks) - 1)


def _expand_counts(name: str, text: str) -> tuple[int, ...]:
    """SLURM's short form of a list of counts: "4(x2),3" is 4, 4, 3."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise ValueError(f'{name}={text} cannot be read at "{part}"; the form is 4(x2),3')
        counts += [int(found[1])] * int(found[2] or 1)
    return tuple(counts)


def first_host(nodes: str) -> str:
    """The first name in SLURM's short form of a list of hosts: "node[03-05,9],gpu1" is node03.

    Raises ValueError for what is not such a list.
    """
    found = re.fullmatch(rf"({_HOST})(?:,{_HOST})*", nodes.strip())
    if found is None:
        raise ValueError(f'the list of nodes "{nodes}" cannot be read; the form is node[03-05,9],gpu1')
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[1])


def _meeting_host(env: Mapping[str, str]) -> str:
    """The machine of rank 0: the first of the step's nodes, unless somebody has said otherwise."""
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if env.get(name):
            return first_host(env[name])
    raise ValueError("SLURM's variables are incomplete: SLURM_JOB_NODELIST is missing (or set MASTER_ADDR)")


def _require(env: Mapping[str, str], names: tuple[str, ...], starter: str) -> None:
    missing = [name for name in names if not env.get(name)]
    if missing:
        present = ", ".join(f"{name}={env[name]}" for name in names if env.get(name)) or "none"
        raise ValueError(f"{starter}'s variables are incomplete: {', '.join(missing)} missing (found: {present})")


def _number(env: Mapping[str, str], name: str, default: str | None = None) -> _Number:
    text = env[name] if default is None else env.get(name, default)
    try:
        return _Number(name, int(text))
    except ValueError:
        raise ValueError(f'{name}="{text}" is not a whole number') from None


def _port(env: Mapping[str, str]) -> int:
    """The port to meet at; two jobs of SLURM on one machine get two."""
    if env.get("MASTER_PORT"):
        port = _number(env, "MASTER_PORT")
        if not 0 < port.value < 2**16:
            raise ValueError(f"{port} is not a port; take 1 to {2**16 - 1}")
        return port.value
    if not env.get("SLURM_JOB_ID"):
        raise ValueError("SLURM's variables are incomplete: SLURM_JOB_ID is missing (or set MASTER_PORT)")
    return _FIRST_PORT + _number(env, "SLURM_JOB_ID").value % _PORTS


def _address(host: str, port: int) -> str:
    bare = f"[{host}]" if ":" in host and not host.startswith("[") else host  # an IPv6 address
    return f"tcp://{bare}:{port}"


def _check_places(rank: _Number, ranks: _Number, local_rank: _Number, local_ranks: _Number) -> None:
    for index, size in ((rank, ranks), (local_rank, local_ranks)):
        if not 0 <= index.value < size.value:
            raise ValueError(f"{index} is not among {size} ranks; it counts from 0 to {size.name} - 1")
    if local_ranks.value > ranks.value:
        raise ValueError(f"{local_ranks} on this machine are more than {ranks} on all")
    # On every machine a higher local rank is a higher rank, so as many ranks stand below and above as local ranks do.
    below, above = rank.value - local_rank.value, ranks.value - rank.value - (local_ranks.value - local_rank.value)
    if below < 0 or above < 0:
        raise ValueError(f"{local_rank} with {local_ranks} contradicts {rank} with {ranks}")
