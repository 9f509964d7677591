"""Bringing arrays to their devices and back, on meshes that may span several processes.

Every process calls these with the same values, in the same order. A host array that is to be cut is first laid out so
that equal slices of it are the shards' parts.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.rules import Axis, SplitAxis, num_shards, sharding_for
from sharding.split import Even, element_order


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def put(tree: Any, sharding: NamedSharding) -> Any:
    """Puts host arrays, the same in every process, on the devices. Returns the tree of jax.Array."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    # device_put would compare the processes' values, by a round of messages each time.
    return jax.tree.map(lambda value: _put_shards(np.asarray(value), sharding), tree)


def _put_shards(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def fetch(tree: Any) -> Any:
    """Waits for replicated device arrays and returns them as host arrays."""
    return jax.device_get(jax.tree.map(_my_copy, tree))


def _my_copy(array: jax.Array) -> jax.Array:
    return array if array.is_fully_addressable else array.addressable_data(0)


def fetch_shards(array: jax.Array) -> np.ndarray:
    """Returns this process's part of an array that is cut along one dimension, or whole where every device has it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(_my_copy(array))
    assert isinstance(array.sharding, NamedSharding)
    axis = next(index for index, names in enumerate(array.sharding.spec) if names is not None)
    shards = {shard.index[axis].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)], axis=axis)


def put_shards(tree: Any, sharding: NamedSharding) -> Any:
    """Puts what fetch_shards gave back on this process's devices."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda value: jax.make_array_from_process_local_data(sharding, value), tree)


def laid_out_shape(shape: Sequence[int], mesh: Mesh, axes: Sequence[Axis]) -> tuple[int, ...]:
    """Returns the shape that lay_out makes of an array's."""
    return dealt_shape(shape, pieces_of(mesh, axes), axes)


def pieces_of(mesh: Mesh, axes: Sequence[Axis]) -> tuple[int, ...]:
    """Returns into how many pieces each dimension is cut."""
    return tuple(num_shards(mesh, axis) for axis in axes)


def dealt_shape(shape: Sequence[int], pieces: Sequence[int], axes: Sequence[Axis]) -> tuple[int, ...]:
    """Returns the shape of an array that is laid out for so many pieces of each dimension."""
    return tuple(
        size if count == 1 else len(_order(axis, size, count))
        for size, axis, count in zip(shape, axes, pieces, strict=True)
    )


def lay_out(value: np.ndarray, mesh: Mesh, axes: Sequence[Axis]) -> np.ndarray:
    """Deals each dimension that is cut to its shards, zeros where there is too little; see sharding/split.py."""
    for dimension, axis in enumerate(axes):
        pieces = num_shards(mesh, axis)
        if pieces > 1:
            value = _take(value, _order(axis, value.shape[dimension], pieces), dimension)
    return value


def whole_again(value: np.ndarray, shape: Sequence[int], pieces: Sequence[int], axes: Sequence[Axis]) -> np.ndarray:
    """Undoes lay_out: returns the array [*shape] that `value` was made of, for so many pieces of each dimension."""
    for dimension, (axis, size, count) in enumerate(zip(axes, shape, pieces, strict=True)):
        if count > 1:
            order = _order(axis, size, count)
            places = np.empty(size, np.int64)  # where each element stands; the last place, if it stands in several
            places[order[order >= 0]] = np.flatnonzero(order >= 0)
            value = np.take(value, places, axis=dimension)
    return value


def put_weight(value: np.ndarray, mesh: Mesh, axes: Sequence[Axis]) -> jax.Array:
    """Lays a weight out and puts each device's part there."""
    laid_out = lay_out(value, mesh, axes)
    array: jax.Array = put(laid_out, sharding_for(mesh, axes, laid_out.shape))
    return array


def abstract_weight(shape: Sequence[int], dtype: Any, mesh: Mesh, axes: Sequence[Axis]) -> jax.ShapeDtypeStruct:
    """Returns the shape and sharding of what put_weight would make."""
    laid_out = laid_out_shape(shape, mesh, axes)
    return jax.ShapeDtypeStruct(laid_out, dtype, sharding=sharding_for(mesh, axes, laid_out))


def _order(axis: Axis, size: int, pieces: int) -> np.ndarray:
    return element_order(axis.parts if isinstance(axis, SplitAxis) else (Even(size),), pieces)


def _take(value: np.ndarray, order: np.ndarray, dimension: int) -> np.ndarray:
    if len(order) == value.shape[dimension] and np.array_equal(order, np.arange(len(order))):
        return value
    taken = np.take(value, np.maximum(order, 0), axis=dimension)
    taken[(slice(None),) * dimension + (order < 0,)] = 0
    return taken
