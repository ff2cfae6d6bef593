"""Reading a process's place from torchrun's and SLURM's variables."""

from __future__ import annotations

import pytest

from meshwright.comm.start import Start, first_host

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host-a",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_JOB_NODELIST": "node[03-05,9]",
    "SLURM_JOB_ID": "4000123",
}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def test_a_plain_shell_gives_no_place() -> None:
    assert (
        Start.from_environment({"HOME": "/root", "MASTER_ADDR": "host-a", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"})
        is None
    )


def test_torchrun_says_everything() -> None:
    expected = Start(5, 8, 1, 4, "tcp://host-a:29500", attempt=2, agent_store=True)
    assert Start.from_environment(TORCHRUN) == expected


def test_the_variables_alone_are_enough_without_torchruns_agent() -> None:
    start = Start.from_environment(without(TORCHRUN, "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"))
    assert start is not None
    assert (start.attempt, start.agent_store) == (0, False)


def test_torchrun_comes_before_slurm() -> None:
    assert Start.from_environment(SLURM | TORCHRUN) == Start.from_environment(TORCHRUN)


def test_slurm_ranks_meet_on_the_first_node_at_a_port_of_their_job() -> None:
    expected = Start(9, 11, 1, 3, "tcp://node03:10123", attempt=0, agent_store=False)
    assert Start.from_environment(SLURM) == expected


def test_a_slurm_step_smaller_than_its_job_is_read_from_the_step() -> None:
    step = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "node9"}
    start = Start.from_environment(SLURM | step)
    assert start is not None
    assert (start.ranks, start.local_ranks, start.rendezvous) == (2, 2, "tcp://node9:10123")


@pytest.mark.parametrize(
    ("rank", "local_rank", "node", "local_ranks"), [("0", "0", "0", 4), ("7", "3", "1", 4), ("10", "2", "2", 3)]
)
def test_each_node_has_its_own_number_of_tasks(rank: str, local_rank: str, node: str, local_ranks: int) -> None:
    place = SLURM | {"SLURM_PROCID": rank, "SLURM_LOCALID": local_rank}
    start = Start.from_environment(place | {"SLURM_NODEID": node})
    assert start is not None
    assert start.local_ranks == local_ranks
    assert Start.from_environment(place) == start, "without SLURM_NODEID, as the block distribution fills the nodes"


def test_tasks_per_node_may_be_one_number() -> None:
    env = without(SLURM, "SLURM_TASKS_PER_NODE") | {"SLURM_NTASKS_PER_NODE": "8", "SLURM_NTASKS": "16"}
    start = Start.from_environment(env)
    assert start is not None
    assert start.local_ranks == 8


def test_a_host_or_port_that_was_set_wins() -> None:
    start = Start.from_environment(SLURM | {"MASTER_PORT": "4321", "MASTER_ADDR": "fe80::1"})
    assert start is not None
    assert start.rendezvous == "tcp://[fe80::1]:4321"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node[03-05,9]", "node03"),
        ("node7", "node7"),
        ("gpu-node7,gpu-node9", "gpu-node7"),
        ("rack[1-2]-n[01-10]", "rack1-n01"),
        ("a[9,11]b,c[1-2]", "a9b"),
        ("n[001].cluster.org,n2", "n001.cluster.org"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["node[03-05", "node03]", "", "node[x-y]", ",node1"])
def test_a_list_of_nodes_that_cannot_be_read_is_shown(nodes: str) -> None:
    with pytest.raises(ValueError, match="the form is"):
        first_host(nodes)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_of_torchrun_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"incomplete: {name} missing"):
        Start.from_environment(without(TORCHRUN, name))


@pytest.mark.parametrize(
    "name", ["SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE", "SLURM_JOB_NODELIST", "SLURM_JOB_ID"]
)
def test_a_missing_variable_of_slurm_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"incomplete.*{name}"):
        Start.from_environment(without(SLURM, name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "RANK=8 is not among WORLD_SIZE=8"),
        ({"RANK": "-1"}, "RANK=-1 is not among"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 is not among LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 on this machine are more than WORLD_SIZE=8"),
        ({"RANK": "0"}, "LOCAL_RANK=1 with LOCAL_WORLD_SIZE=4 contradicts RANK=0"),
        ({"RANK": "7"}, "contradicts RANK=7 with WORLD_SIZE=8"),
        ({"WORLD_SIZE": "eight"}, 'WORLD_SIZE="eight" is not a whole number'),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
    ],
)
def test_contradictions_of_torchrun_are_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Start.from_environment(TORCHRUN | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_NTASKS": "12"}, r"SLURM_TASKS_PER_NODE=4\(x2\),3 makes 11 tasks, but SLURM_NTASKS=12"),
        ({"SLURM_TASKS_PER_NODE": "4(y2)"}, "cannot be read at"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID=3, but the tasks stand on 3 nodes"),
        ({"SLURM_LOCALID": "3"}, "SLURM_LOCALID=3 is not among SLURM_TASKS_PER_NODE=3"),
    ],
)
def test_contradictions_of_slurm_are_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Start.from_environment(SLURM | change)
