"""How a layer declares a weight: shape, dtype and logical axes, once. Values come from the loader."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx


def parameter(shape: Sequence[int], axes: Sequence[str | None], dtype: jnp.dtype) -> nnx.Param[jax.Array]:
    """Declares a weight. Build modules under nnx.eval_shape: then no memory is taken.

    Args:
      shape: Size of each dimension.
      axes: Logical axis of each dimension, a name in sharding.rules.RULES; None where it is never split.
      dtype: Dtype in device memory, which is also the compute dtype.
    """
    if len(shape) != len(axes):
        raise ValueError(f"shape {tuple(shape)} and axes {tuple(axes)} must have the same length")
    return nnx.Param(jnp.zeros(shape, dtype), logical_axes=tuple(axes))
