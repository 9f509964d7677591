"""Normalisation: of tokens, and of the heads of queries and keys.

Weights stay in float32 whatever the model's dtype is: they are few, and some families keep them near 1 + tiny.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.layers.parameter import parameter
from sharding.collectives import num_shards, sum_over
from sharding.rules import Axis, SplitAxis
from sharding.split import HeadSplit, KVHeads, QueryHeads

_DTYPE = jnp.dtype(jnp.float32)


class RMSNorm(nnx.Module):
    """Scales each token to unit root mean square, then by a learnt weight. Computed in float32."""

    def __init__(self, dim: int, eps: float, axis: Axis = "norm") -> None:
        self.weight = parameter((dim,), (axis,), _DTYPE)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x: [..., M] to [..., M] in x's dtype."""
        wide = x.astype(jnp.float32)
        return self.scaled(x, jnp.mean(wide * wide, axis=-1, keepdims=True))

    def scaled(self, x: jax.Array, mean_square: jax.Array) -> jax.Array:
        """Maps x: [..., M] with the mean of its squares: [..., 1] to [..., M] in x's dtype."""
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(mean_square + self.eps) * self.weight[...]).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Shifts each token to mean 0 and scales it to variance 1, then by learnt weights if any. Computed in float32."""

    def __init__(self, dim: int, eps: float, *, has_weights: bool = True) -> None:
        self.weight = parameter((dim,), ("norm",), _DTYPE) if has_weights else None
        self.bias = parameter((dim,), ("norm",), _DTYPE) if has_weights else None
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x: [T, M] to [T, M] in x's dtype."""
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        out = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
        if self.weight is not None and self.bias is not None:
            out = out * self.weight[...] + self.bias[...]
        return out.astype(x.dtype)


class HeadNorms(nnx.Module):
    """Normalises each head of the queries and of the keys by itself."""

    def __init__(self, head_dim: int, eps: float) -> None:
        self.q, self.k = RMSNorm(head_dim, eps), RMSNorm(head_dim, eps)

    def __call__(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps q: [T, H, D] and k: [T, K, D] to the same shapes."""
        return self.q(q), self.k(k)


class JointHeadNorms(nnx.Module):
    """Normalises all heads of the queries together, and all heads of the keys, wherever they are."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float) -> None:
        self.sizes = num_heads, num_kv_heads, head_dim
        q_axis, k_axis = (SplitAxis("heads", (part(*self.sizes),)) for part in (QueryHeads, KVHeads))
        self.q = RMSNorm(num_heads * head_dim, eps, q_axis)
        self.k = RMSNorm(num_kv_heads * head_dim, eps, k_axis)

    def __call__(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps q: [T, H, D] and k: [T, K, D] to the same shapes."""
        q_flat, k_flat = q.reshape(q.shape[0], -1), k.reshape(k.shape[0], -1)
        num_heads, num_kv_heads, head_dim = self.sizes
        copies = HeadSplit(num_heads, num_kv_heads, num_shards("heads")).num_copies
        q_normed = self.q.scaled(q_flat, _mean_square(q_flat, num_heads * head_dim))
        k_normed = self.k.scaled(k_flat, _mean_square(k_flat, num_kv_heads * head_dim * copies))
        return q_normed.reshape(q.shape), k_normed.reshape(k.shape)


def _mean_square(x: jax.Array, count: int) -> jax.Array:
    """Returns [T, 1]: the squares of x: [T, n] of all devices, `count` numbers that aren't zeros of padding."""
    wide = x.astype(jnp.float32)
    return sum_over(jnp.sum(wide * wide, axis=-1, keepdims=True), "heads") / count


Norm = RMSNorm | LayerNorm
