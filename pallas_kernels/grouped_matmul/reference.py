"""Grouped matrix product in its plainest form: the definition of correct. Each row gathers its own matrix."""

import jax
import jax.numpy as jnp


def grouped_matmul_reference(rows: jax.Array, matrices: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """See pallas_kernels.grouped_matmul.grouped_matmul. Returns [R, O] float32, zeros for rows without a group."""
    ends = jnp.cumsum(group_sizes)
    group = jnp.searchsorted(ends, jnp.arange(rows.shape[0]), side="right")  # [R], E for rows without a group
    mine = matrices[jnp.minimum(group, len(matrices) - 1)].astype(jnp.float32)  # [R, I, O]
    out = jnp.einsum("ri,rio->ro", rows.astype(jnp.float32), mine, precision=jax.lax.Precision.HIGHEST)
    return jnp.where((group < len(matrices))[:, None], out, 0)
