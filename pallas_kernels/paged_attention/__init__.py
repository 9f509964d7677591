"""Attention over a KV cache that lies in blocks."""

import jax

from pallas_kernels.paged_attention.xla import paged_attention_xla

__all__ = ["paged_attention"]


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Computes causal attention of each sequence's newest tokens over its blocks, grouped-query heads included.

    The keys and values of the new tokens are already in the cache. Sequences with one token and sequences
    with many may be mixed. Block 0 is never read for a real token, so padding may hold anything, NaN included.

    Args:
      q: [T, H, D] queries, sequence after sequence.
      k_cache: [N, P, K, D] keys; H is a multiple of K.
      v_cache: [N, P, K, D] values.
      block_tables: [S, B] int32, physical block ids in logical order.
      seq_lens: [S] int32, tokens of each sequence with this step's; 0 for padding.
      query_start_loc: [S + 1] int32, first query of each sequence.
      scale: Multiplies the scores; usually D ** -0.5.

    Returns:
      [T, H, D] in the cache's dtype; rows of padding tokens hold rubbish.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    if k_cache.shape != v_cache.shape or k_cache.shape[3] != head_dim or num_heads % num_kv_heads:
        raise ValueError(f"q {q.shape} doesn't fit k_cache {k_cache.shape} and v_cache {v_cache.shape}")
    return paged_attention_xla(q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, scale=scale)
