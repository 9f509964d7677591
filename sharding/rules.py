"""Rules from the logical axes that weights declare to mesh axes. A weight never names a mesh axis itself."""

from collections.abc import Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

RULES: dict[str, str | None] = {
    "vocab": "tensor",
    "embed": None,
    "embed_in": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "tensor",
    "norm": None,
    "router": None,
    "latent": None,
}


def sharding_for(mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
    """Returns the sharding of an array whose dimensions carry these logical axes.

    Args:
      mesh: The mesh to lie on.
      axes: One logical axis a dimension; None for a dimension that is never split.

    Raises:
      ValueError: An axis is unknown, or two dimensions ask for one mesh axis.
    """
    unknown = [axis for axis in axes if axis is not None and axis not in RULES]
    if unknown:
        raise ValueError(f"unknown logical axis {unknown[0]!r}; known: {', '.join(RULES)}")
    mesh_axes = [None if axis is None else RULES[axis] for axis in axes]
    used = [axis for axis in mesh_axes if axis is not None]
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {tuple(axes)} ask for the mesh axis {used[0]!r} more than once")
    return NamedSharding(mesh, PartitionSpec(*mesh_axes))
