"""DeviceMesh: ranks and coordinates are one to one, and groups of a kind divide the ranks."""

import pytest

from quire.base.errors import ConfigError
from quire.contracts.parallel import ParallelConfig
from quire.parallel.mesh import DeviceMesh, MeshCoordinates

MESHES = [DeviceMesh(), DeviceMesh(tensor=3), DeviceMesh(2, 1, 2), DeviceMesh(2, 3, 2), DeviceMesh(1, 4, 3)]
GROUPS = ("tensor", "context", "pipeline", "stage", "world")


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_and_coordinates_are_one_to_one(mesh):
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert len(set(places)) == mesh.size
    assert [mesh.rank_of(place) for place in places] == list(range(mesh.size))


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_groups_of_a_kind_divide_the_ranks(mesh, kind):
    groups = {mesh.group(rank, kind) for rank in range(mesh.size)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert list(group) == sorted(group)
        for rank in group:
            assert mesh.group(rank, kind) == group


def test_tensor_ranks_are_neighbours_and_stages_lie_furthest_apart():
    mesh = DeviceMesh(tensor=2, context=2, pipeline=2)
    assert mesh.coordinates(5) == MeshCoordinates(tensor=1, context=0, pipeline=1)
    assert mesh.group(5, "tensor") == (4, 5)
    assert mesh.group(5, "pipeline") == (1, 5)
    assert mesh.group(5, "context") == (5, 7)
    assert mesh.group(5, "stage") == (4, 5, 6, 7)


def test_mesh_of_a_configuration_leaves_replicas_out():
    config = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3, data_parallel_size=5)
    assert DeviceMesh.of(config) == DeviceMesh(tensor=2, pipeline=3)
    assert DeviceMesh.of(config).size == config.world_size == 6
    assert DeviceMesh.of(ParallelConfig(prefill_context_parallel_size=3)) == DeviceMesh(context=3)


@pytest.mark.parametrize(
    "call",
    [
        lambda mesh: mesh.coordinates(4),
        lambda mesh: mesh.coordinates(-1),
        lambda mesh: mesh.rank_of(MeshCoordinates(tensor=2)),
        lambda mesh: mesh.group(0, "rows"),
    ],
)
def test_what_is_not_in_the_mesh_is_refused(call):
    with pytest.raises(ConfigError, match="must be"):
        call(DeviceMesh(tensor=2, pipeline=2))
