"""Which ranks share a host, and whether a hierarchy can be built on that."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from meshwright.comm.group import CommunicationError
from meshwright.comm.hosts import Hosts, Place, host_names, this_host


def test_hosts_stand_in_the_order_of_their_first_member() -> None:
    assert Hosts.of("bbaa").members == ((0, 1), (2, 3))
    assert Hosts.of("baba").members == ((0, 2), (1, 3))


def test_a_member_has_a_row_and_a_column() -> None:
    hosts = Hosts.of("aaabbb")
    assert hosts.place(4) == Place(host=1, place=1)
    assert hosts.inner(4) == (3, 4, 5)
    assert hosts.outer(4) == (1, 4)


@pytest.mark.parametrize("names", ["abcabc", "aabbcc", "abccba"])
def test_rows_and_columns_cross_in_one_member(names: str) -> None:
    hosts = Hosts.of(names)
    for index in range(len(names)):
        assert set(hosts.inner(index)) & set(hosts.outer(index)) == {index}
        place = hosts.place(index)
        assert hosts.members[place.host][place.place] == index
        assert hosts.inner(index)[place.place] == hosts.outer(index)[place.host] == index


@pytest.mark.parametrize(("names", "layered"), [("aabb", True), ("abab", True), ("aaaa", False), ("abcd", False)])
def test_a_hierarchy_is_of_use_on_several_hosts_with_several_ranks_each(names: str, layered: bool) -> None:
    assert Hosts.of(names).obstacle == ""
    assert Hosts.of(names).layered is layered


@pytest.mark.parametrize(
    ("names", "numbers", "remedy"), [("aaab", "3, 1", "2 on each"), ("aab", "2, 1", "multiple of 2")]
)
def test_different_numbers_of_ranks_are_an_obstacle_with_a_remedy(names: str, numbers: str, remedy: str) -> None:
    hosts = Hosts.of(names)
    assert not hosts.layered
    assert f"the hosts have {numbers} ranks" in hosts.obstacle
    assert remedy in hosts.obstacle


def test_the_ranks_tell_each_other_their_hosts_through_the_store() -> None:
    store = dist.HashStore()
    store.set("host/1", "b")
    assert host_names(store, 0, 2, "a", timeout=1.0) == ("a", "b")


def test_a_rank_that_does_not_name_its_host_is_named() -> None:
    with pytest.raises(CommunicationError, match=r"rank 0: ranks \[1, 2\] did not name their host in 0.1 s"):
        host_names(dist.HashStore(), 0, 3, "a", timeout=0.1)


def test_a_host_has_one_name() -> None:
    assert this_host() == this_host() != ""
