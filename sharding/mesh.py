"""The device mesh. Its axes are named once, here."""

from collections.abc import Sequence

import jax
import numpy as np

AXES = ("data", "tensor")


def make_mesh(devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """Returns a mesh with every device on the tensor axis."""
    return jax.sharding.Mesh(np.asarray(devices).reshape(1, -1), AXES)
