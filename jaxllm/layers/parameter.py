"""How a layer declares a weight: shape, dtype and logical axes, once. Values come from the loader."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from sharding.rules import Axis


def parameter(shape: Sequence[int], axes: Sequence[Axis], dtype: jnp.dtype) -> nnx.Param[jax.Array]:
    """Declares a weight. Build modules under nnx.eval_shape: then no memory is taken.

    Args:
      shape: Size of each dimension of the whole weight, as the checkpoint has it.
      axes: Logical axis of each dimension, a name in sharding.rules.RULES or such a name with parts; None where it is
        never split.
      dtype: Dtype in device memory, which is also the compute dtype.
    """
    if len(shape) != len(axes):
        raise ValueError(f"shape {tuple(shape)} and axes {tuple(axes)} must have the same length")
    return nnx.Param(jnp.zeros(shape, dtype), logical_axes=tuple(axes))
