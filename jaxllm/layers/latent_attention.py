"""Multi-head latent attention: the cache holds one short vector a token for all heads, from which keys and values
follow by a matrix of each head.

Those matrices are moved to the other side: a query is mapped into the latent space, attends there with the latent
vectors as keys and as values, and what it gets is mapped out. Nothing is ever expanded for the whole context.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.layers.attention import LayerCache, largest_of, scaled_heads
from jaxllm.layers.forward_batch import ForwardBatch
from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.parameter import parameter
from jaxllm.layers.rope import Rope
from pallas_kernels.kv_cache_update import kv_cache_update
from pallas_kernels.paged_attention import paged_attention
from sharding.rules import SplitAxis
from sharding.split import Even

_NORM_EPS = 1e-6  # whatever the model's own is


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of latent attention.

    Attributes:
      hidden: M.
      heads: H.
      query_latent: Width that queries are squeezed to first, or None.
      latent: Width of what the cache holds for keys and values, C.
      rotated: Width of the part of each key, the same for all heads, that is rotated; the cache holds it beside.
      unrotated: Width of the rest of each key.
      value: Width of each value.
    """

    hidden: int
    heads: int
    query_latent: int | None
    latent: int
    rotated: int
    unrotated: int
    value: int

    @property
    def query(self) -> int:
        """Width of one head's query: the unrotated part, then the rotated one."""
        return self.unrotated + self.rotated


class LatentAttention(nnx.Module):
    """DeepSeek's attention. Devices share the heads; the cache, which all heads use, each has whole.

    Args:
      sizes: Its sizes.
      dtype: Of the weights.
      rope: Of sizes.rotated elements.
      scale: Multiplies the scores. Static.
      has_bias: Whether what squeezes and the output have biases.
    """

    def __init__(self, sizes: LatentSizes, dtype: jnp.dtype, *, rope: Rope, scale: float, has_bias: bool) -> None:
        self.sizes, self.rope, self.scale = sizes, rope, scale
        heads, hidden = sizes.heads, sizes.hidden
        if sizes.query_latent is None:
            self.q_in, self.q_norm = None, None
        else:
            self.q_in = Linear(hidden, sizes.query_latent, axes=("latent", "embed"), has_bias=has_bias, dtype=dtype)
            self.q_norm = RMSNorm(sizes.query_latent, _NORM_EPS)
        width, in_axis = sizes.query_latent or hidden, "latent" if sizes.query_latent else "embed"
        q_axis, value_axis = (SplitAxis("heads", (Even(heads, size),)) for size in (sizes.query, sizes.value))
        self.q = Linear(width, heads * sizes.query, axes=(q_axis, in_axis), has_bias=False, dtype=dtype)
        self.kv_in = Linear(
            hidden, sizes.latent + sizes.rotated, axes=("latent", "embed"), has_bias=has_bias, dtype=dtype
        )
        self.kv_norm = RMSNorm(sizes.latent, _NORM_EPS)
        # Of each head: rows that make the unrotated part of keys of a latent vector, then rows that make values.
        self.kv_out = parameter((heads, sizes.unrotated + sizes.value, sizes.latent), ("heads", None, "latent"), dtype)
        self.out = Linear(heads * sizes.value, hidden, axes=("embed", value_axis), has_bias=has_bias, dtype=dtype)
        self.has_cache_scales = False

    def scale_cache(self) -> None:
        """Declares what rows are divided by on their way into the cache: one number a dimension."""
        shape = (1, 1, self.sizes.latent + self.sizes.rotated)
        self.cache_scales = nnx.data(parameter(shape, (None, None, None), jnp.dtype(jnp.float32)))
        self.has_cache_scales = True

    def reach(self, keys: jax.Array, values: jax.Array) -> jax.Array:
        """Returns the largest magnitudes that cached rows [..., 1, D] can have at any position: [1, 1, D].

        The rows are keys; values are the same.
        """
        del values
        latent, key = jnp.split(keys, (self.sizes.latent,), axis=-1)
        return largest_of(jnp.concatenate([latent, self.rope.reach(key)], axis=-1))[None]

    def __call__(self, x: jax.Array, batch: ForwardBatch, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        """Maps x: [T, M] to [T, M], and the cache to the cache with this step's latent vectors in it.

        The cache is one array, whose rows are keys and values at once.
        """
        sizes, num_tokens = self.sizes, x.shape[0]
        rows, queries = self._rows(x, batch.positions), self._queries(x, batch.positions)
        if self.has_cache_scales:  # what the cache lacks, queries and results make good
            (scales,) = self.cache_scales[...]  # [1, latent + rotated]
            rows, queries = rows / scales, scaled_heads(queries, scales)
        cache = kv_cache_update(cache, rows, rows, batch.slots)
        attended = paged_attention(
            queries,
            cache,
            batch.block_tables,
            batch.seq_lens,
            batch.query_start_loc,
            scale=self.scale,
        )
        if self.has_cache_scales:
            attended = scaled_heads(attended, scales)
        values = _per_head(attended[..., : sizes.latent], self.kv_out[...][:, sizes.unrotated :], "thc,hvc->thv")
        return self.out(values.reshape(num_tokens, -1)), cache

    def _rows(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns what the cache holds of x: [T, M]: [T, 1, latent + rotated]."""
        squeezed = self.kv_in(x)
        latent, key = jnp.split(squeezed, (self.sizes.latent,), axis=-1)
        key = self.rope(key[:, None], positions)  # [T, 1, rotated]
        return jnp.concatenate([self.kv_norm(latent)[:, None], key], axis=-1)

    def _queries(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns the queries of x: [T, M] in the space of the cache's rows: [T, H, latent + rotated]."""
        sizes = self.sizes
        if self.q_in is not None and self.q_norm is not None:
            x = self.q_norm(self.q_in(x))
        q = self.q(x).reshape(x.shape[0], -1, sizes.query)  # [T, H, query]
        unrotated, rotated = jnp.split(q, (sizes.unrotated,), axis=-1)
        latent = _per_head(unrotated, self.kv_out[...][:, : sizes.unrotated], "thn,hnc->thc")
        return jnp.concatenate([latent, self.rope(rotated, positions)], axis=-1)


def _per_head(x: jax.Array, matrices: jax.Array, einsum: str) -> jax.Array:
    """Multiplies each head of x: [T, H, …] with its matrix, in the matrices' dtype, accumulated in float32."""
    product = jnp.einsum(einsum, x.astype(matrices.dtype), matrices, preferred_element_type=jnp.float32)
    return product.astype(x.dtype)
