"""The quantized product in plain XLA: the fast path on CPU and the fallback everywhere."""

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul.quantize import quantize_rows

_MAX_STREAMED_ROWS = 16  # up to here multiply-and-add, which widens in registers, beats widening the whole weight first


def quantized_matmul_xla(
    x: jax.Array,  # [T, I]
    weight: jax.Array,  # [O, I]
    scales: jax.Array,  # [G, O]
    *,
    quantize_activations: bool,
) -> jax.Array:
    """See pallas_kernels.quantized_matmul.quantized_matmul. Returns [T, O] float32."""
    if quantize_activations:
        values, row_scales = quantize_rows(x, weight.dtype)
        product = _integer_product if weight.dtype == jnp.int8 else _fp8_product
        return product(values, weight).astype(jnp.float32) * row_scales * scales
    num_groups, num_outputs = scales.shape
    widened = weight.astype(jnp.float32)
    if num_groups > 1:
        grouped = widened.reshape(num_outputs, num_groups, -1) * scales.T[..., None]
        widened, scales = grouped.reshape(weight.shape), jnp.ones((1, num_outputs))
    x = x.astype(jnp.float32)
    if len(x) <= _MAX_STREAMED_ROWS:
        return jnp.sum(x[:, None, :] * widened, axis=-1) * scales
    return jnp.einsum("ti,oi->to", x, widened, precision=jax.lax.Precision.HIGHEST) * scales


def _integer_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiplies int8 x: [T, I] and weight: [O, I] into int32 [T, O].

    One row alone takes XLA:CPU longer than thirty: then a second one goes with it.
    """
    num_tokens = len(x)
    if num_tokens == 1:
        x = jnp.pad(x, ((0, 1), (0, 0)))
    return jnp.einsum("ti,oi->to", x, weight, preferred_element_type=jnp.int32)[:num_tokens]


def _fp8_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiplies fp8 x: [T, I] and weight: [O, I] into float32 [T, O]."""

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.einsum("ti,oi->to", x, weight, preferred_element_type=jnp.float32)

    def widened(x: jax.Array, weight: jax.Array) -> jax.Array:
        return product(x.astype(jnp.float32), weight.astype(jnp.float32))

    return jax.lax.platform_dependent(x, weight, cpu=widened, default=product)
