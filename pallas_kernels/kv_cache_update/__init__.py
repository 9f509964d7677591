"""Writing into a KV cache that lies in blocks, and copying its blocks."""

import jax

__all__ = ["copy_blocks", "kv_cache_update"]


def kv_cache_update(cache: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """Writes one row a token. In place where the caller donates the cache.

    Args:
      cache: [N, P, K, D].
      new: [T, K, D] rows to write, converted to the cache's dtype.
      slots: [T] int32, block id * P + offset. Real tokens have distinct slots; padding goes to slot 0.

    Returns:
      [N, P, K, D] cache with the rows written.
    """
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    rows = cache.reshape(num_blocks * block_size, num_kv_heads, head_dim)
    return rows.at[slots].set(new.astype(cache.dtype), mode="promise_in_bounds").reshape(cache.shape)


def copy_blocks(cache: jax.Array, sources: jax.Array, destinations: jax.Array) -> jax.Array:
    """Copies whole blocks, all of them read before any is written. Pad with 0 -> 0, the null block.

    Args:
      cache: [N, P, K, D].
      sources: [C] int32 block ids.
      destinations: [C] int32 block ids.

    Returns:
      [N, P, K, D] cache with the copies made.
    """
    return cache.at[destinations].set(cache[sources], mode="promise_in_bounds")
