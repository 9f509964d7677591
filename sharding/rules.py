"""Rules from the logical axes that weights declare to mesh axes. A weight never names a mesh axis itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.split import Part

RULES: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "embed": (),
    "embed_in": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert", "tensor"),
    "norm": (),
    "router": (),
    "latent": (),
}


@dataclass(frozen=True)
class SplitAxis:
    """A logical axis, and the parts that stand along the dimension that carries it; see sharding/split.py."""

    name: str
    parts: tuple[Part, ...]


# What a weight says of one dimension: a logical axis, whose elements are dealt one by one where they are not in parts;
# None where the dimension is never split.
Axis = str | SplitAxis | None


def axis_name(axis: Axis) -> str | None:
    """Returns the logical axis alone."""
    return axis.name if isinstance(axis, SplitAxis) else axis


def num_shards(mesh: Mesh, axis: Axis) -> int:
    """Returns into how many pieces a dimension with this axis is cut."""
    return math.prod(mesh.shape[name] for name in mesh_axes(axis))


def mesh_axes(axis: Axis) -> tuple[str, ...]:
    """Returns the mesh axes that a logical axis is cut over.

    Raises:
      ValueError: The axis is unknown.
    """
    name = axis_name(axis)
    if name is None:
        return ()
    if name not in RULES:
        raise ValueError(f"unknown logical axis {name!r}; known: {', '.join(RULES)}")
    return RULES[name]


def sharding_for(mesh: Mesh, axes: Sequence[Axis], shape: Sequence[int] | None = None) -> NamedSharding:
    """Returns the sharding of an array whose dimensions carry these logical axes.

    Args:
      mesh: The mesh to lie on.
      axes: One a dimension.
      shape: Of the array, dealt and padded as sharding.partition does; None leaves the sizes unchecked.

    Raises:
      ValueError: An axis is unknown, two dimensions ask for one mesh axis, or a size can't be cut evenly.
    """
    cut = [mesh_axes(axis) for axis in axes]
    used = [name for names in cut for name in names]
    twice = [name for name in used if used.count(name) > 1]
    if twice:
        names = tuple(axis_name(axis) for axis in axes)
        raise ValueError(
            f"logical axes {names} ask for the mesh axis {twice[0]!r} more than once; "
            "name another logical axis for one of these dimensions, or None to keep it whole"
        )
    for axis, size in zip(axes, shape or (), strict=False):
        pieces = num_shards(mesh, axis)
        if size % pieces:
            raise ValueError(
                f"a dimension {axis_name(axis)!r} of {size} can't be cut into {pieces} equal pieces; "
                f"set --tensor-parallel-size to a divisor of {size}, or pad it"
            )
    return NamedSharding(mesh, PartitionSpec(*(_entry(names) for names in cut)))


def _entry(names: tuple[str, ...]) -> str | tuple[str, ...] | None:
    if len(names) > 1:
        return names
    return names[0] if names else None
