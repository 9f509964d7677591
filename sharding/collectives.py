"""What shards do together, by logical axis, inside jax.shard_map. Outside it everything is one shard, and these do
nothing: a layer is written once for one device and for many."""

import jax
import jax.numpy as jnp

from sharding.rules import mesh_axes


def num_shards(axis: str) -> int:
    """Returns over how many shards this logical axis is cut where the caller is traced. Static."""
    mesh = jax.sharding.get_abstract_mesh()
    size = 1
    for name in bound_axes(axis):
        size *= mesh.shape[name]
    return size


def bound_axes(axis: str) -> tuple[str, ...]:
    """Returns the mesh axes, of several devices each, that the logical axis is cut over where the caller is traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name in mesh_axes(axis) if name in mesh.manual_axes and mesh.shape[name] > 1)


def shard_index(axis: str) -> jax.Array:
    """Returns which shard of the logical axis this is, int32, from 0."""
    names = bound_axes(axis)
    return jax.lax.axis_index(names) if names else jnp.int32(0)


def sum_over(x: jax.Array, axis: str | None) -> jax.Array:
    """Adds up every shard's x, where the logical axis is cut."""
    names = bound_axes(axis) if axis else ()
    return jax.lax.psum(x, names) if names else x


def gather(x: jax.Array, axis: str) -> jax.Array:
    """Joins every shard's x along the first dimension."""
    names = bound_axes(axis)
    return jax.lax.all_gather(x, names, tiled=True) if names else x


def rows_for_columns(x: jax.Array, axis: str) -> jax.Array:
    """Exchanges pieces so that each shard has whole rows: [R, C / n] becomes [R / n, C]. R is a multiple of n."""
    names = bound_axes(axis)
    return jax.lax.all_to_all(x, names, split_axis=0, concat_axis=1, tiled=True) if names else x
