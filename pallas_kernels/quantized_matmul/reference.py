"""The quantized product in its plainest form: the definition of correct."""

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul.quantize import quantize_rows


def quantized_matmul_reference(
    x: jax.Array,  # [T, I]
    weight: jax.Array,  # [O, I]
    scales: jax.Array,  # [G, O]
    *,
    quantize_activations: bool,
) -> jax.Array:
    """See pallas_kernels.quantized_matmul.quantized_matmul. Returns [T, O] float32."""
    if quantize_activations:
        values, row_scales = quantize_rows(x, weight.dtype)
        wide = jnp.int32 if weight.dtype == jnp.int8 else jnp.float32
        exact = jax.lax.Precision.HIGHEST
        products = jnp.einsum("ti,oi->to", values.astype(wide), weight.astype(wide), precision=exact)
        return products.astype(jnp.float32) * row_scales * scales
    size = weight.shape[1] // scales.shape[0]
    widened = weight.astype(jnp.float32) * jnp.repeat(scales, size, axis=0).T
    return jnp.einsum("ti,oi->to", x.astype(jnp.float32), widened, precision=jax.lax.Precision.HIGHEST)
