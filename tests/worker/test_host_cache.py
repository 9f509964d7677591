"""HostCache: what is stored comes back, whatever the order and the batches; in numpy and in pinned memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.layers.attention import LayerCache
from jaxllm.worker.cache_engine import num_host_blocks
from jaxllm.worker.host_cache import HostCache
from jaxllm.worker.programs import COPY_BATCH
from sharding.mesh import make_mesh
from sharding.rules import sharding_for


def _rows(first: int) -> list[LayerCache]:
    """Two layers; block i holds the value first + i, its values the same below zero."""
    values = jnp.broadcast_to(first + jnp.arange(COPY_BATCH, dtype=jnp.float32)[:, None, None, None], (16, 2, 1, 4))
    return [LayerCache(values, -values), LayerCache(values + 0.5, -values - 0.5)]


@pytest.mark.parametrize("is_pinned", [False, True])
def test_blocks_come_back_from_several_batches(is_pinned: bool) -> None:
    mesh = make_mesh(jax.local_devices()[:1])
    cache = HostCache(sharding_for(mesh, (None, None, "kv_heads", None)), is_pinned)
    cache.store([1, 2, 3], _rows(100))
    cache.store([7, 2], _rows(200))  # block 2 had been free again
    seen = {}
    for destinations, layers in cache.take([(3, 31), (2, 21), (7, 71)]):
        for row in np.flatnonzero(destinations):
            keys = [float(layer.k[row, 1, 0, 3]) for layer in layers]
            assert [float(layer.v[row, 0, 0, 0]) for layer in layers] == [-key for key in keys]
            seen[int(destinations[row])] = keys
    assert seen == {31: [102.0, 102.5], 21: [201.0, 201.5], 71: [200.0, 200.5]}
    with pytest.raises(KeyError):
        next(cache.take([(3, 31)]))


def test_oracle_of_host_blocks() -> None:
    assert num_host_blocks(4, 2 * 12 * 16 * 12 * 64 * 2) == 7281
    assert num_host_blocks(0, 4096) == num_host_blocks(2**-30, 1) == 0
    assert num_host_blocks(2**-29, 1) == 2
