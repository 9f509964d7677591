"""How weights are laid out, and the errors of axes that don't fit; on meshes of devices that need not exist."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from sharding.mesh import AXES, make_mesh, stage_meshes
from sharding.partition import abstract_weight, laid_out_shape, lay_out
from sharding.rules import SplitAxis, sharding_for
from sharding.split import Even


def _mesh(num_devices: int, num_stages: int = 1) -> Mesh:
    return make_mesh([jax.local_devices()[0]] * num_devices, num_stages)


def test_stages_have_neighbouring_devices() -> None:
    devices = [object() for _ in range(6)]
    mesh = Mesh(np.asarray(devices).reshape(2, 3).T[None, None], AXES)
    assert dict(mesh.shape) == {"data": 1, "expert": 1, "tensor": 3, "stage": 2}
    assert [list(mine.devices.ravel()) for mine in stage_meshes(mesh)] == [devices[:3], devices[3:]]
    with pytest.raises(ValueError, match="3 devices can't be dealt to 2 stages"):
        _mesh(3, 2)


def test_gate_and_up_are_both_on_every_device() -> None:
    axis = SplitAxis("mlp", (Even(3), Even(3)))
    weight = np.arange(12).reshape(6, 2) + 1
    expected = [[1, 2], [3, 4], [7, 8], [9, 10], [5, 6], [0, 0], [11, 12], [0, 0]]
    assert lay_out(weight, _mesh(2), (axis, "embed")).tolist() == expected
    assert lay_out(weight, _mesh(1), (axis, "embed")) is weight
    assert laid_out_shape((6, 2), _mesh(2), (axis, "embed")) == (8, 2)


def test_a_declared_weight_has_its_shape_and_sharding() -> None:
    weight = abstract_weight((7, 4), np.float32, _mesh(2), ("vocab", "embed"))
    assert weight.shape == (8, 4) and weight.sharding is not None
    assert weight.sharding.spec == PartitionSpec("tensor", None)


def test_experts_lie_over_the_expert_and_the_tensor_axis() -> None:
    assert sharding_for(_mesh(2), ("experts", "embed", None)).spec == PartitionSpec(("expert", "tensor"), None, None)


def test_sizes_that_do_not_divide_name_the_way_out() -> None:
    with pytest.raises(ValueError, match="'mlp' of 9 can't be cut into 2 equal pieces; set --tensor-parallel-size"):
        sharding_for(_mesh(2), ("mlp", "embed"), (9, 4))
    with pytest.raises(ValueError, match="more than once; name another logical axis"):
        sharding_for(_mesh(2), ("experts", "mlp"))
