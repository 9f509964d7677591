"""Grouped-query self-attention over the paged KV cache."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.layers.forward_batch import ForwardBatch
from jaxllm.layers.linear import Linear
from jaxllm.layers.rope import rope_frequencies, rotate
from pallas_kernels.kv_cache_update import kv_cache_update
from pallas_kernels.paged_attention import paged_attention

# One layer's keys and values in device memory, in the layout that pallas_kernels.paged_attention.KVLayout describes.
LayerCache = tuple[jax.Array, ...]


class Attention(nnx.Module):
    """Projects, rotates, writes the new keys and values to their slots, attends, projects back.

    Query, key and value are one matrix, in that order.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self.rope_frequencies = tuple(frequencies.tolist())  # [D/2], static
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = Linear(
            config.hidden_size, width, axes=("heads", "embed"), has_bias=config.attention_bias, dtype=dtype
        )
        self.out = Linear(
            self.num_heads * self.head_dim,
            config.hidden_size,
            axes=("embed", "heads"),
            has_bias=config.attention_bias,
            dtype=dtype,
        )

    def __call__(self, x: jax.Array, batch: ForwardBatch, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        """Maps x: [T, M] to [T, M], and the cache to the cache with this step's tokens in it."""
        num_tokens = x.shape[0]
        qkv = self.qkv(x).reshape(num_tokens, -1, self.head_dim)  # [T, H + 2K, D]
        q, k, v = jnp.split(qkv, (self.num_heads, self.num_heads + self.num_kv_heads), axis=1)
        frequencies = jnp.array(self.rope_frequencies, jnp.float32)
        q = rotate(q, batch.positions, frequencies)
        k = rotate(k, batch.positions, frequencies)
        cache = kv_cache_update(cache, k, v, batch.slots)
        attended = paged_attention(
            q,
            cache,
            batch.block_tables,
            batch.seq_lens,
            batch.query_start_loc,
            scale=self.head_dim**-0.5,
        )
        return self.out(attended.reshape(num_tokens, -1).astype(x.dtype)), cache
