"""Writes to a KV cache in blocks, in every layout that XLA serves, and copies of its blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_cache_update import copy_blocks, kv_cache_update
from pallas_kernels.paged_attention import KVLayout

_NUMBERS = {"block_size": 2, "num_kv_heads": 1, "head_dim": 2}


def _layout(backend, dtype=jnp.float32, **numbers):
    return KVLayout(backend=backend, dtype=jnp.dtype(dtype), **{**_NUMBERS, **numbers})


@pytest.mark.parametrize("backend", ["triton", "xla", "reference"])
def test_rows_land_in_their_slots_and_nowhere_else(backend):
    layout = _layout(backend)
    cache = jnp.full((3, 2, 1, 2), -1.0)
    new = jnp.array([[[1.0, 2.0]], [[3.0, 4.0]]])
    kv = kv_cache_update(layout.pack(cache, cache), new, new + 10, jnp.array([5, 2]), backend=backend)
    k, v = layout.unpack(kv)
    expected = [[[-1, -1], [-1, -1]], [[3, 4], [-1, -1]], [[-1, -1], [1, 2]]]
    np.testing.assert_array_equal(np.asarray(k)[:, :, 0], expected)
    expected = [[[-1, -1], [-1, -1]], [[13, 14], [-1, -1]], [[-1, -1], [11, 12]]]
    np.testing.assert_array_equal(np.asarray(v)[:, :, 0], expected)


@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 300])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8])
def test_update_is_in_place_when_the_cache_is_donated(num_kv_heads, num_tokens, dtype):
    layout = _layout("xla", dtype, block_size=16, num_kv_heads=num_kv_heads, head_dim=64)
    kv = layout.zeros(8192)
    update = jax.jit(kv_cache_update, donate_argnums=0, static_argnames="backend")
    rows = jnp.zeros((num_tokens, num_kv_heads, 64))
    analysis = update.lower(kv, rows, rows, jnp.zeros(num_tokens, jnp.int32), backend="xla").compile().memory_analysis()
    assert analysis.alias_size_in_bytes >= 2 * kv[0].nbytes
    assert analysis.temp_size_in_bytes < kv[0].nbytes // 50


@pytest.mark.parametrize("backend", ["triton", "xla", "reference"])
def test_int8_rows_are_rounded_and_kept_in_range(backend):
    layout = _layout(backend, jnp.int8, block_size=4)
    cache = layout.pack(*(jnp.zeros((1, 4, 1, 2), jnp.int8),) * 2)
    rows = jnp.array([[[0.6, -0.2]], [[500.0, -500.0]]])
    slots = jnp.array([1, 3])
    k, v = layout.unpack(kv_cache_update(cache, rows, rows, slots, k_scale=0.5, v_scale=2.0, backend=backend))
    assert np.asarray(k)[0, :, 0].tolist() == [[0, 0], [1, 0], [0, 0], [127, -128]]
    assert np.asarray(v)[0, :, 0].tolist() == [[0, 0], [0, 0], [0, 0], [127, -128]]


@pytest.mark.parametrize(("dtype", "largest"), [(jnp.float8_e4m3fn, 448), (jnp.float8_e5m2, 57344)])
def test_fp8_rows_are_kept_in_range(dtype, largest):
    layout = _layout("xla", dtype)
    cache = layout.pack(*(jnp.zeros((1, 2, 1, 2), dtype),) * 2)
    rows = jnp.array([[[1e6, -0.5]]])
    k, _ = layout.unpack(kv_cache_update(cache, rows, rows, jnp.array([1]), backend="xla"))
    assert np.asarray(k, np.float32)[0, 1, 0].tolist() == [largest, -0.5]


def test_copies_of_blocks_with_padding():
    cache = jnp.arange(5.0).reshape(5, 1, 1, 1)
    out = copy_blocks(cache, jnp.array([1, 1, 0, 0]), jnp.array([2, 3, 0, 0]), backend="xla")
    assert np.asarray(out).ravel().tolist() == [0, 1, 1, 1, 4]
