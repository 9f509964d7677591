"""A matrix product where each group of rows has a matrix of its own: what the experts of a layer compute."""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.grouped_matmul.xla import grouped_matmul_xla

__all__ = ["GROUPED_MATMUL_BACKENDS", "grouped_matmul"]

_FUNCTIONS = {"xla": grouped_matmul_xla, "reference": grouped_matmul_reference}
GROUPED_MATMUL_BACKENDS = tuple(_FUNCTIONS)


def grouped_matmul(rows: jax.Array, matrices: jax.Array, group_sizes: jax.Array, *, backend: str = "xla") -> jax.Array:
    """Multiplies each row with its group's matrix.

    Example: with group_sizes [2, 0, 1] rows 0 and 1 meet matrices[0], row 2 meets matrices[2].

    Args:
      rows: [R, I], group after group.
      matrices: [E, I, O].
      group_sizes: [E] int32, rows of each group; may be 0. Rows past their sum may hold anything, NaN included.
      backend: One of GROUPED_MATMUL_BACKENDS.

    Returns:
      [R, O] in rows' dtype, products in the matrices' dtype, accumulated in float32. Rows that no group owns hold
      rubbish.

    Raises:
      ValueError: The shapes don't fit, or there is no such backend.
    """
    if backend not in _FUNCTIONS:
        raise ValueError(f"backend must be one of {', '.join(_FUNCTIONS)}, got {backend!r}")
    if rows.ndim != 2 or matrices.ndim != 3 or rows.shape[1] != matrices.shape[1]:
        raise ValueError(f"rows {rows.shape} don't fit matrices {matrices.shape}")
    if group_sizes.shape != matrices.shape[:1] or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes must be {matrices.shape[0]} integers, got {group_sizes.dtype}{group_sizes.shape}"
        )
    return _FUNCTIONS[backend](rows.astype(matrices.dtype), matrices, group_sizes).astype(rows.dtype)
