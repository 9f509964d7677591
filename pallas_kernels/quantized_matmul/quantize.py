"""Making int8, int4 and fp8 numbers of floats. Symmetric: zero stays zero, there is no zero point."""

import jax
import jax.numpy as jnp

INT8 = jnp.dtype(jnp.int8)
FP8 = jnp.dtype(jnp.float8_e4m3fn)
_LARGEST = {INT8: 127.0, jnp.dtype(jnp.int4): 7.0, FP8: 448.0}


def quantize_weight(weight: jax.Array, dtype: jnp.dtype, group_size: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Quantizes each group of a row by itself.

    Args:
      weight: [O, I] floats.
      dtype: int8, int4 or float8_e4m3fn.
      group_size: Inputs that share a scale; divides I. None: all of a row.

    Returns:
      [O, I] values, and their scales: [I / group_size, O] float32, such that value * scale is about the weight.

    Raises:
      ValueError: group_size doesn't divide I.
    """
    num_outputs, num_inputs = weight.shape
    size = group_size or num_inputs
    if num_inputs % size:
        raise ValueError(f"group_size must divide the {num_inputs} inputs, got {group_size}")
    values, scales = _quantize(weight.reshape(num_outputs, -1, size), jnp.dtype(dtype))
    return values.reshape(weight.shape), scales[..., 0].T


def quantize_rows(x: jax.Array, dtype: jnp.dtype = INT8) -> tuple[jax.Array, jax.Array]:
    """Quantizes each row of x: [T, I] by itself. Returns [T, I] values and [T, 1] float32 scales."""
    return _quantize(x, dtype)


def _quantize(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Maps the largest magnitude along the last axis to the largest number; a row of zeros has scale 1."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scales = jnp.where(largest == 0, 1.0, largest / _LARGEST[dtype])
    values = x / scales
    return (values if dtype == FP8 else jnp.round(values)).astype(dtype), scales
