"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.layers.parameter import parameter


class RMSNorm(nnx.Module):
    """Scales each token to unit root mean square, then by a learnt weight. Computed in float32."""

    def __init__(self, dim: int, eps: float, dtype: jnp.dtype) -> None:
        self.weight = parameter((dim,), ("norm",), dtype)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x: [T, M] to [T, M] in x's dtype."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean_square + self.eps)).astype(x.dtype) * self.weight[...]
