"""Grouped-query self-attention over the paged KV cache."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.layers.forward_batch import ForwardBatch
from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import HeadNorms, JointHeadNorms
from jaxllm.layers.parameter import parameter
from jaxllm.layers.rope import Rope
from pallas_kernels.kv_cache_update import kv_cache_update
from pallas_kernels.paged_attention import paged_attention
from sharding.collectives import num_shards
from sharding.rules import SplitAxis
from sharding.split import HeadSplit, KVHeads, QueryHeads

# One layer's keys and values in device memory, in the layout that pallas_kernels.paged_attention.KVLayout describes.
LayerCache = tuple[jax.Array, ...]


class Attention(nnx.Module):
    """Projects, normalises, rotates, writes the new keys and values to their slots, attends, projects back.

    Query, key and value are one matrix, in that order. Devices share the heads.

    Args:
      config: Sizes.
      dtype: Of the weights.
      rope: How queries and keys are rotated; None where positions come from elsewhere.
      qkv_bias: Whether queries, keys and values have biases.
      out_bias: Whether the output has one.
      head_norms: What queries and keys are normalised with, or None.
      window: Tokens that a token sees, itself included; None for all. Static, as is what follows.
      scale: Multiplies the scores; None is D ** -0.5.
      soft_cap: Bound of the scores, or None.
      has_sinks: Whether each head has a learnt logit that takes part in the softmax and has no value.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        *,
        rope: Rope | None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        head_norms: HeadNorms | JointHeadNorms | None = None,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        has_sinks: bool = False,
    ) -> None:
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.rope, self.head_norms, self.window, self.soft_cap = rope, head_norms, window, soft_cap
        self.scale = self.head_dim**-0.5 if scale is None else scale
        hidden_size, out_size = config.hidden_size, self.num_heads * self.head_dim
        width = out_size + 2 * self.num_kv_heads * self.head_dim
        sizes = self.num_heads, self.num_kv_heads
        queries, keys = QueryHeads(*sizes, self.head_dim), KVHeads(*sizes, self.head_dim)
        in_axis, out_axis = SplitAxis("heads", (queries, keys, keys)), SplitAxis("heads", (queries,))
        self.qkv = Linear(hidden_size, width, axes=(in_axis, "embed"), has_bias=qkv_bias, dtype=dtype)
        self.out = Linear(out_size, hidden_size, axes=("embed", out_axis), has_bias=out_bias, dtype=dtype)
        one_each = SplitAxis("heads", (QueryHeads(*sizes, 1),))
        self.sinks = parameter((self.num_heads,), (one_each,), jnp.dtype(jnp.float32)) if has_sinks else None
        self.has_cache_scales = False

    def scale_cache(self) -> None:
        """Declares what keys and values are divided by on their way into the cache: one number a head and dimension."""
        heads = SplitAxis("kv_heads", (KVHeads(self.num_heads, self.num_kv_heads, 1),))
        shape = (2, self.num_kv_heads, self.head_dim)
        self.cache_scales = nnx.data(parameter(shape, (None, heads, None), jnp.dtype(jnp.float32)))
        self.has_cache_scales = True

    def reach(self, keys: jax.Array, values: jax.Array) -> jax.Array:
        """Returns the largest magnitudes that cached keys and values [..., K, D] have at any position: [2, K, D]."""
        return jnp.stack([largest_of(keys if self.rope is None else self.rope.reach(keys)), largest_of(values)])

    def __call__(self, x: jax.Array, batch: ForwardBatch, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        """Maps x: [T, M] to [T, M], and the cache to the cache with this step's tokens in it."""
        num_tokens = x.shape[0]
        mine = HeadSplit(self.num_heads, self.num_kv_heads, num_shards("heads"))
        num_heads, num_kv_heads = mine.heads_per_shard, mine.kv_heads_per_shard
        qkv = self.qkv(x).reshape(num_tokens, -1, self.head_dim)  # [T, H + 2K, D]
        q, k, v = jnp.split(qkv, (num_heads, num_heads + num_kv_heads), axis=1)
        if self.head_norms is not None:
            q, k = self.head_norms(q, k)
        if self.rope is not None:
            q, k = self.rope(q, batch.positions), self.rope(k, batch.positions)
        if self.has_cache_scales:  # what the cache lacks, queries and results make good
            k_scales, v_scales = self.cache_scales[...]  # [K, D] each
            q, k, v = scaled_heads(q, k_scales), k / k_scales, v / v_scales
        cache = kv_cache_update(cache, k, v, batch.slots)
        attended = paged_attention(
            q,
            cache,
            batch.block_tables,
            batch.seq_lens,
            batch.query_start_loc,
            scale=self.scale,
            sliding_window=self.window,
            logit_soft_cap=self.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
        )
        if self.has_cache_scales:
            attended = scaled_heads(attended, v_scales)
        return self.out(attended.reshape(num_tokens, -1).astype(x.dtype)), cache


def largest_of(rows: jax.Array) -> jax.Array:
    """Returns the largest magnitudes [K, D] of rows: [..., K, D]."""
    return jnp.max(jnp.abs(rows), axis=tuple(range(rows.ndim - 2)))


def scaled_heads(x: jax.Array, scales: jax.Array) -> jax.Array:
    """Multiplies each head of x: [T, H, D] with its KV head's scales: [K, D]. Returns x's dtype."""
    by_head = jnp.repeat(scales, x.shape[1] // scales.shape[0], axis=0)  # [H, D]
    return (x * by_head).astype(x.dtype)
