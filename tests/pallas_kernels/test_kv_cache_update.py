import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_cache_update import copy_blocks, kv_cache_update


def test_rows_land_in_their_slots_and_nowhere_else():
    cache = jnp.full((3, 2, 1, 2), -1.0)
    new = jnp.array([[[1.0, 2.0]], [[3.0, 4.0]]])
    out = kv_cache_update(cache, new, jnp.array([5, 2]))
    expected = [[[-1, -1], [-1, -1]], [[3, 4], [-1, -1]], [[-1, -1], [1, 2]]]
    np.testing.assert_array_equal(np.asarray(out)[:, :, 0], expected)


def test_update_is_in_place_when_the_cache_is_donated():
    cache = jnp.zeros((1024, 16, 3, 64))
    update = jax.jit(kv_cache_update, donate_argnums=0)
    analysis = update.lower(cache, jnp.zeros((4, 3, 64)), jnp.zeros(4, jnp.int32)).compile().memory_analysis()
    assert analysis.alias_size_in_bytes >= cache.nbytes
    assert analysis.temp_size_in_bytes < cache.nbytes // 100


def test_copies_read_before_they_write():
    cache = jnp.arange(4.0).reshape(4, 1, 1, 1)
    out = copy_blocks(cache, jnp.array([1, 2, 0]), jnp.array([2, 3, 0]))
    assert np.asarray(out).ravel().tolist() == [0, 1, 1, 2]
