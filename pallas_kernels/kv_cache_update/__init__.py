"""Writing into a KV cache that lies in blocks, and copying its blocks."""

import jax
import jax.numpy as jnp

from pallas_kernels.backends import choose_backend
from pallas_kernels.paged_attention.kv_layout import as_bits, float_of_bits, pack_planes

__all__ = ["copy_blocks", "kv_cache_update", "quantize_kv"]


def kv_cache_update(
    kv: tuple[jax.Array, ...],
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    backend: str | None = None,
) -> tuple[jax.Array, ...]:
    """Writes one row of keys and of values a token. In place where the caller donates the cache.

    Args:
      kv: One layer's cache in the backend's pallas_kernels.paged_attention.KVLayout. Where values are keys too, v is
        left out of layouts of two arrays.
      k: [T, K, D] rows to write, divided by k_scale and converted to the cache's dtype as quantize_kv says.
      v: [T, K, D], the same with v_scale.
      slots: [T] int32, block id * P + offset. Real tokens have distinct slots, and tokens of one block stand together
        in the order of their slots; padding goes to slot 0, and whether block 0 is written is left open.
      k_scale: Of a stored key; static. Use the same in paged_attention.
      v_scale: The same of values.
      backend: One of pallas_kernels.BACKENDS; None chooses, see pallas_kernels.backends.

    Returns:
      The cache with the rows written.
    """
    backend = choose_backend(backend)
    dtype = float_of_bits(kv[0].dtype) if backend == "xla" else kv[0].dtype
    k, v = quantize_kv(k, k_scale, dtype), quantize_kv(v, v_scale, dtype)
    if backend == "tpu":
        from pallas_kernels.kv_cache_update.tpu import write_planes

        return (write_planes(kv[0], pack_planes(k[:, None], v[:, None])[:, :, 0], slots),)
    token_axes = (3, 2) if backend == "xla" else (1, 1)
    return tuple(
        _write_rows(array, as_bits(rows, array.dtype), slots, axis)
        for array, rows, axis in zip(kv, (k, v), token_axes, strict=False)
    )


def quantize_kv(rows: jax.Array, scale: float, dtype: jnp.dtype) -> jax.Array:
    """Returns rows / scale in a cache's dtype: rounded to nearest and kept within the range of int8 or fp8."""
    if scale != 1.0:
        rows = rows.astype(jnp.float32) / scale
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        rows = jnp.clip(jnp.round(rows), limits.min, limits.max)
    elif dtype.itemsize == 1:  # a float8 has no infinity to overflow to: it would become NaN
        limit = float(jnp.finfo(dtype).max)
        rows = jnp.clip(rows, -limit, limit)
    return rows.astype(dtype)


def copy_blocks(
    cache: jax.Array, sources: jax.Array, destinations: jax.Array, *, backend: str | None = None
) -> jax.Array:
    """Copies whole blocks. Pad with 0 -> 0, the null block.

    Args:
      cache: [N, ...], one array of a KV cache in any layout.
      sources: [C] int32 block ids.
      destinations: [C] int32 block ids, distinct but for padding; none is another copy's source.
      backend: One of pallas_kernels.BACKENDS; None chooses, see pallas_kernels.backends.

    Returns:
      [N, ...] cache with the copies made.
    """
    if choose_backend(backend) == "tpu":
        from pallas_kernels.kv_cache_update.tpu import copy_blocks_tpu

        return copy_blocks_tpu(cache, sources, destinations)
    return cache.at[destinations].set(cache[sources], mode="promise_in_bounds")


def _write_rows(cache: jax.Array, new: jax.Array, slots: jax.Array, token_axis: int) -> jax.Array:
    """Writes new: [T, K, D] into cache: [N, P, K, D], or with P at another axis."""
    # Not reshaped to rows: with one head XLA:CPU would lay those out anew and copy the whole cache.
    blocks, offsets = jnp.divmod(slots, cache.shape[token_axis])
    place = (blocks, *(slice(None),) * (token_axis - 1), offsets)
    return cache.at[place].set(new, mode="promise_in_bounds")
