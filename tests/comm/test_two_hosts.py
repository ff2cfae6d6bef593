"""Two hosts that are network namespaces, two ranks on each, joined by a wire that counts bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from two_hosts import NUMEL

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

PAYLOAD = 4 * NUMEL
RANKS_PER_HOST = 2


@dataclass(frozen=True)
class Namespace:
    """A network namespace, its address, and the end of the wire that is in it."""

    name: str
    address: str
    interface: str


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces joined by a veth pair; the test is skipped where they cannot be had."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command (iproute2)")
    pair = (
        Namespace(f"meshwright-{os.getpid()}-a", "10.213.0.1", "wire-a"),
        Namespace(f"meshwright-{os.getpid()}-b", "10.213.0.2", "wire-b"),
    )
    try:
        try:
            for host in pair:
                ip("netns", "add", host.name)
            first, second = pair
            ip("-n", first.name, "link", "add", first.interface, "type", "veth", "peer", second.interface)
            ip("-n", first.name, "link", "set", second.interface, "netns", second.name)
            for host in pair:
                ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
                ip("-n", host.name, "link", "set", host.interface, "up")
                ip("-n", host.name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be used: {error.stderr.strip()}")
        yield pair
    finally:
        for host in pair:  # the wire goes with them
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)


def start(rank: int, hosts: tuple[Namespace, Namespace]) -> subprocess.Popen[str]:
    """The process of a rank, on its host, as torchrun would have started it."""
    host = hosts[rank // RANKS_PER_HOST]
    place = {
        "RANK": str(rank),
        "WORLD_SIZE": str(2 * RANKS_PER_HOST),
        "LOCAL_RANK": str(rank % RANKS_PER_HOST),
        "LOCAL_WORLD_SIZE": str(RANKS_PER_HOST),
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": host.interface,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    program = str(Path(__file__).with_name("two_hosts.py"))
    return subprocess.Popen(
        ["ip", "netns", "exec", host.name, sys.executable, program, host.interface],
        env=os.environ | place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    try:
        texts = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, error) in zip(processes, texts, strict=True):
        assert process.returncode == 0, error
    return [output for output, _ in texts]


def test_a_hierarchy_computes_the_same_and_sends_less_between_hosts(hosts: tuple[Namespace, Namespace]) -> None:
    texts = outputs([start(rank, hosts) for rank in range(2 * RANKS_PER_HOST)])
    first, second = (json.loads(texts[host * RANKS_PER_HOST]) for host in range(2))
    # Payloads that one host sends to the other. Flat: a reduce-scatter or all-gather sends a quarter from each of two
    # ranks to each of two. Hierarchically: each rank to one. The one that is not the source of a broadcast sends none.
    expected = {"all_reduce": 1.0, "all_reduce_maximum": 1.0, "reduce_scatter": 0.5, "all_gather": 0.5}
    for name, share in expected.items():
        for flat, layered in (first[name], second[name]):
            assert layered == pytest.approx(share * PAYLOAD, rel=0.15), name
            assert layered < 0.8 * flat, name
    assert second["broadcast"][1] == pytest.approx(PAYLOAD, rel=0.15)
    assert second["broadcast"][1] < 1.1 * second["broadcast"][0]
    assert first["broadcast"][1] < 0.1 * PAYLOAD
