import jax
import pytest
from jax.sharding import PartitionSpec

from sharding.mesh import make_mesh
from sharding.rules import sharding_for


def test_logical_axes_become_mesh_axes():
    mesh = make_mesh(jax.local_devices()[:1])
    assert mesh.axis_names == ("data", "expert", "tensor", "stage")
    assert sharding_for(mesh, ("embed", "heads")).spec == PartitionSpec(None, "tensor")
    assert sharding_for(mesh, (None, None, "kv_heads", None)).spec == PartitionSpec(None, None, "tensor", None)


def test_unknown_and_colliding_axes_are_refused():
    mesh = make_mesh(jax.local_devices()[:1])
    with pytest.raises(ValueError, match="unknown logical axis 'hedas'; known: vocab, embed"):
        sharding_for(mesh, ("embed", "hedas"))
    with pytest.raises(ValueError, match="ask for the mesh axis 'tensor' more than once"):
        sharding_for(mesh, ("vocab", "mlp"))
