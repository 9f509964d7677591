"""How a layer declares a weight: shape, dtype and logical axes, once. Values come from the loader."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.quantization import Scheme
from sharding.rules import Axis, SplitAxis, axis_name
from sharding.split import Even, Groups


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


def quantized(weight: "nnx.Param[jax.Array]", scheme: Scheme) -> tuple["nnx.Param[jax.Array]", "nnx.Param[jax.Array]"]:
    """Declares what was declared as floats anew: as numbers, whose metadata name the scheme, and as their scales.

    Args:
      weight: [O, I], or experts [E, I, O].
      scheme: How; jaxllm/quantization.py says what shape the scales have.
    """
    shape, axes = weight.get_value().shape, weight.get_metadata("logical_axes")
    numbers = nnx.Param(jnp.zeros(shape, held_dtype(scheme)), logical_axes=axes, scheme=scheme)
    num_groups = scheme.num_groups(shape[1])
    in_axis = _axis_of_groups(axes[1], shape[1], shape[1] // num_groups) if num_groups > 1 else None
    if len(shape) == 3:
        scales = parameter((shape[0], num_groups, shape[2]), (axes[0], in_axis, axes[2]), jnp.dtype(jnp.float32))
    else:
        scales = parameter((num_groups, shape[0]), (in_axis, axes[0]), jnp.dtype(jnp.float32))
    return numbers, scales


def _axis_of_groups(axis: Axis, num_inputs: int, size: int) -> Axis:
    """Returns the axis of what there is one of for `size` inputs, which are dealt to devices as `axis` says."""
    if axis is None:
        return None
    parts = axis.parts if isinstance(axis, SplitAxis) else (Even(num_inputs),)
    return SplitAxis(axis_name(axis) or "", tuple(Groups(part, size) for part in parts))


def held_dtype(scheme: Scheme) -> jnp.dtype:
    """Returns what numbers are held as: on CPU JAX 0.10 can't hand int4 arrays to a compiled program; int8 does."""
    is_int8 = scheme.dtype_name == "int4" and jax.default_backend() == "cpu"
    return jnp.dtype(jnp.int8 if is_int8 else scheme.dtype)
