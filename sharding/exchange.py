"""What goes from stage to stage where a process doesn't have them all: small programs on a mesh of several stages.

Every process that has devices of that mesh runs them, in the same order. Stages that have nothing to give take part
with zeros.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.mesh import AXES
from sharding.partition import replicated

BY_STAGE = PartitionSpec("stage")


def spans_processes(mesh: Mesh) -> bool:
    """Whether some of the mesh's devices are another process's."""
    return len(mesh.local_devices) < mesh.size


def neighbours(mesh: Mesh, stage: int) -> Mesh:
    """Returns the mesh of a stage and the one after it."""
    return Mesh(mesh.devices[..., stage : stage + 2], AXES)


def hand_on(x: jax.Array) -> jax.Array:
    """Gives each stage what the one before has. Call it under jax.shard_map."""
    num_stages = jax.lax.axis_size("stage")
    return jax.lax.ppermute(x, "stage", [(stage, stage + 1) for stage in range(num_stages - 1)])


def add_up_stages(tree: Any) -> Any:
    """Gives every stage what one of them has, where the others have zeros. Call it under jax.shard_map."""
    return jax.tree.map(lambda x: jax.lax.psum(x, "stage"), tree)


def stacked_spec(shape: Sequence[int], dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Returns what `stacked` makes of arrays of this shape, one a stage."""
    whole = (shape[0] * mesh.shape["stage"], *shape[1:])
    return jax.ShapeDtypeStruct(whole, dtype, sharding=NamedSharding(mesh, BY_STAGE))


def stacked(mine: jax.Array | None, spec: jax.ShapeDtypeStruct) -> jax.Array:
    """Puts arrays of all stages one below the other, without moving any.

    Args:
      mine: This process's, of one stage, replicated there; None where it has nothing to give.
      spec: Of the result, from stacked_spec.
    """
    sharding: Any = spec.sharding
    shards = {} if mine is None else {shard.device: shard.data for shard in mine.addressable_shards}
    shape = sharding.shard_shape(spec.shape)
    return jax.make_array_from_single_device_arrays(
        spec.shape,
        sharding,
        [
            shards[device] if device in shards else jax.device_put(np.zeros(shape, spec.dtype), device)
            for device in sharding.mesh.local_devices
        ],
    )


def of_stage(array: jax.Array, mesh: Mesh) -> jax.Array:
    """Takes the part of a stage, given by its own mesh, out of a stacked array. The stage has a device here."""
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    mine = [shards[device] for device in mesh.local_devices]
    return jax.make_array_from_single_device_arrays(mine[0].shape, replicated(mesh), mine)
