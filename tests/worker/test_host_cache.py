"""HostCache: what is stored comes back, whatever the order and the batches; in numpy and in pinned memory."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from jaxllm.layers.attention import LayerCache
from jaxllm.worker.cache_engine import host_blocks_of
from jaxllm.worker.host_cache import HostCache
from jaxllm.worker.programs import COPY_BATCH
from sharding.mesh import make_mesh
from sharding.rules import sharding_for


def _rows(first: int) -> list[LayerCache]:
    """Two layers; block i holds the value first + i, its values the same below zero."""
    values = jnp.broadcast_to(first + jnp.arange(COPY_BATCH, dtype=jnp.float32)[:, None, None, None], (16, 2, 1, 4))
    return [(values, -values), (values + 0.5, -values - 0.5)]


@pytest.mark.parametrize("is_pinned", [False, True])
def test_blocks_come_back_from_several_batches(is_pinned: bool) -> None:
    mesh = make_mesh(jax.local_devices()[:1])
    cache = HostCache(sharding_for(mesh, (None, None, "kv_heads", None)), is_pinned)
    cache.store([1, 2, 3], _rows(100))
    cache.store([7, 2], _rows(200))  # block 2 had been free again
    seen = {}
    for destinations, layers in cache.take([(3, 31), (2, 21), (7, 71)]):
        for row in np.flatnonzero(destinations):
            keys = [float(layer[0][row, 1, 0, 3]) for layer in layers]
            assert [float(layer[1][row, 0, 0, 0]) for layer in layers] == [-key for key in keys]
            seen[int(destinations[row])] = keys
    assert seen == {31: [102.0, 102.5], 21: [201.0, 201.5], 71: [200.0, 200.5]}
    with pytest.raises(KeyError):
        next(cache.take([(3, 31)]))


def _config(swap_space: float, max_num_seqs: int = 256) -> EngineConfig:
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        max_position_embeddings=1024,
    )
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, max_model_len=1024)
    cache = CacheConfig(swap_space=swap_space)
    return EngineConfig(model=model, model_path=Path("model.gguf"), cache=cache, scheduler=scheduler)


def test_oracle_of_host_blocks() -> None:
    size = 2 * 12 * 16 * 12 * 64 * 2  # keys and values, layers, tokens, KV heads, head dim, bytes
    assert host_blocks_of(_config(4), 16, size) == 7281
    assert host_blocks_of(_config(0), 16, size) == 0
    assert host_blocks_of(_config(size / 2**30), 16, size) == 0  # the null block alone
    assert host_blocks_of(_config(4, max_num_seqs=2), 16, size) == 2 * 64 + 1  # full sequences
