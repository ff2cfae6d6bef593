"""The mesh: ranks, places and groups agree."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.layout.mesh import ORDER, Axis, Coordinate, Mesh

sizes = st.integers(1, 5)
meshes = st.builds(Mesh, data=sizes, pipeline=sizes, tensor=sizes)


@given(meshes)
@settings(max_examples=30, deadline=None)
def test_every_rank_has_one_place_and_every_place_one_rank(mesh: Mesh) -> None:
    places = [mesh.coordinate(rank) for rank in range(mesh.size)]
    assert len(set(places)) == mesh.size
    assert [mesh.rank(place) for place in places] == list(range(mesh.size))


@given(meshes, st.sampled_from(ORDER))
@settings(max_examples=30, deadline=None)
def test_the_groups_along_an_axis_divide_the_ranks(mesh: Mesh, axis: Axis) -> None:
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert len(group) == mesh.extent(axis)
        for index, rank in enumerate(group):
            assert mesh.coordinate(rank).along(axis) == index
            assert mesh.group(axis, rank) == group


def _shard_sizes(mesh: Mesh) -> list[int]:
    return [shard for shard in range(1, mesh.data + 1) if mesh.data % shard == 0]


@given(meshes)
@settings(max_examples=30, deadline=None)
def test_shard_groups_divide_the_ranks_and_so_do_replica_groups(mesh: Mesh) -> None:
    everyone = list(range(mesh.size))
    for shard in _shard_sizes(mesh):
        for group_of, length in ((mesh.shard_group, shard), (mesh.replica_group, mesh.data // shard)):
            groups = {group_of(rank, shard) for rank in everyone}
            assert sorted(rank for group in groups for rank in group) == everyone
            assert {len(group) for group in groups} == {length}
            assert all(rank in group_of(rank, shard) for rank in everyone)


@given(meshes)
@settings(max_examples=30, deadline=None)
def test_a_shard_group_and_a_replica_group_meet_in_one_rank_and_span_the_data_group(mesh: Mesh) -> None:
    for shard in _shard_sizes(mesh):
        for rank in range(mesh.size):
            run, peers = mesh.shard_group(rank, shard), mesh.replica_group(rank, shard)
            assert set(run) & set(peers) == {rank}
            spanned = [member for peer in peers for member in mesh.shard_group(peer, shard)]
            assert tuple(spanned) == mesh.group(Axis.DATA, rank)


def test_one_run_is_the_data_group_and_has_no_replicas() -> None:
    mesh = Mesh(data=4, pipeline=2)
    assert mesh.shard_group(3, 4) == mesh.group(Axis.DATA, 3) == (1, 3, 5, 7)
    assert mesh.replica_group(3, 4) == (3,)
    assert (mesh.shard_group(3, 1), mesh.replica_group(3, 1)) == ((3,), (1, 3, 5, 7))


def test_neighbours_on_the_data_axis_divide_the_states() -> None:
    mesh = Mesh(data=4, tensor=2)
    assert [mesh.shard_group(rank, 2) for rank in (0, 3, 5)] == [(0, 2), (1, 3), (5, 7)]
    assert [mesh.replica_group(rank, 2) for rank in (0, 3, 5)] == [(0, 4), (3, 7), (1, 5)]


def test_runs_that_do_not_divide_the_data_axis_are_refused() -> None:
    with pytest.raises(ValueError, match="runs of 3 ranks do not divide 4 data ranks; try 2 or 4"):
        Mesh(data=4).shard_group(0, 3)
    with pytest.raises(ValueError, match="runs of 0 ranks do not divide 4 data ranks; try 1"):
        Mesh(data=4).replica_group(0, 0)


def test_tensor_ranks_are_neighbours_and_data_ranks_are_far_apart() -> None:
    mesh = Mesh(data=2, pipeline=2, tensor=2)
    assert mesh.groups(Axis.TENSOR) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups(Axis.PIPELINE) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups(Axis.DATA) == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_one_rank_is_a_mesh_with_groups_of_itself() -> None:
    assert [Mesh().group(axis, 0) for axis in ORDER] == [(0,), (0,), (0,)]


def test_places_outside_the_mesh_are_named() -> None:
    with pytest.raises(ValueError, match="rank 8 is not on a mesh of 8 ranks; take 0 to 7"):
        Mesh(2, 2, 2).coordinate(8)
    with pytest.raises(ValueError, match="pipeline axis has the indices 0 to 1"):
        Mesh(2, 2, 2).rank(Coordinate(0, 2, 0))
    with pytest.raises(ValueError, match="tensor axis has 0 ranks"):
        Mesh(tensor=0)
