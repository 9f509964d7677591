"""The device mesh. Its axes are named once, here."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

AXES = ("data", "expert", "tensor", "stage")


def make_mesh(devices: Sequence[jax.Device], num_stages: int = 1) -> Mesh:
    """Returns a mesh of stages, whose devices stand on the tensor axis. Neighbours share a stage.

    Example: eight devices and two stages make stage 0 of devices 0 to 3 and stage 1 of devices 4 to 7.

    Raises:
      ValueError: The devices can't be dealt evenly to the stages.
    """
    if len(devices) % num_stages:
        raise ValueError(f"{len(devices)} devices can't be dealt to {num_stages} stages")
    by_stage = np.asarray(devices).reshape(num_stages, -1)
    return Mesh(by_stage.T[None, None], AXES)


def stage_meshes(mesh: Mesh) -> list[Mesh]:
    """Returns each stage's own mesh, in order."""
    return [Mesh(mesh.devices[..., index : index + 1], AXES) for index in range(mesh.shape["stage"])]


def is_mine(mesh: Mesh) -> bool:
    """Whether this process has devices of the mesh."""
    return any(device.process_index == jax.process_index() for device in mesh.devices.ravel())
