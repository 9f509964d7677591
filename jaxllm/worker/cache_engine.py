"""CacheEngine: owns the KV arrays in device memory, allocated once, and moves blocks by id, to the host too."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllm.config import DEFAULT_CPU_KV_CACHE_BYTES, CacheConfig, EngineConfig
from jaxllm.exceptions import ConfigError
from jaxllm.intmath import cdiv
from jaxllm.layers.attention import LayerCache
from jaxllm.logger import get_logger
from jaxllm.worker.host_cache import HostCache
from jaxllm.worker.programs import COPY_BATCH, CompiledPrograms
from sharding.rules import sharding_for

_logger = get_logger(__name__)
_DEFAULT_BLOCK_SIZE = {"cpu": 16, "gpu": 16, "tpu": 128}
_CACHE_AXES = (None, None, "kv_heads", None)


class CacheEngine:
    """The KV cache of every layer: two [N, P, K, D] arrays each. Block 0 is the null block.

    Attributes:
      caches: One LayerCache a layer. A step takes them (they are donated) and puts its result back.
      num_blocks: N.
      block_size: P.
      num_host_blocks: Blocks of the host cache, or 0.
    """

    def __init__(self, config: EngineConfig, mesh: Mesh, dtype: jnp.dtype, platform: str) -> None:
        model = config.model
        if platform == "cpu":
            dtype = jnp.dtype(jnp.float32)  # XLA:CPU would widen a narrower cache, all of it, in every step
        self.block_size = config.cache.block_size or _DEFAULT_BLOCK_SIZE.get(platform, 16)
        block_bytes = bytes_per_block(config, self.block_size, dtype)
        self.num_blocks = _num_blocks(config, self.block_size, block_bytes, platform)
        shape = (self.num_blocks, self.block_size, model.num_key_value_heads, model.head_dim)
        sharding = sharding_for(mesh, _CACHE_AXES)
        self.caches = tuple(
            LayerCache(jnp.zeros(shape, dtype, device=sharding), jnp.zeros(shape, dtype, device=sharding))
            for _ in range(model.num_hidden_layers)
        )
        self.num_host_blocks = num_host_blocks(config, self.block_size, block_bytes)
        self._host_cache = HostCache(sharding, is_pinned=platform != "cpu")
        _logger.info(
            "KV cache: %d blocks of %d tokens, %.2f GiB; on the host %d blocks",
            self.num_blocks,
            self.block_size,
            self.num_blocks * block_bytes / 2**30,
            self.num_host_blocks,
        )

    def swap_out(self, blocks: Sequence[tuple[int, int]], programs: CompiledPrograms) -> None:
        """Copies (device, host) blocks of every layer to the host."""
        for first in range(0, len(blocks), COPY_BATCH):
            batch = blocks[first : first + COPY_BATCH]
            ids = np.zeros(COPY_BATCH, np.int32)  # padding reads the null block
            ids[: len(batch)] = [source for source, _ in batch]
            sources = jax.device_put(ids)
            rows = [programs("gather_blocks", COPY_BATCH, cache, sources) for cache in self.caches]
            self._host_cache.store([destination for _, destination in batch], rows)

    def swap_in(self, blocks: Sequence[tuple[int, int]], programs: CompiledPrograms) -> None:
        """Copies (host, device) blocks of every layer to the device; they leave the host."""
        for ids, rows in self._host_cache.take(blocks):
            destinations = jax.device_put(ids)
            self.caches = tuple(
                programs("scatter_blocks", COPY_BATCH, cache, destinations, mine)
                for cache, mine in zip(self.caches, rows, strict=True)
            )

    def copy(self, blocks: Sequence[tuple[int, int]], programs: CompiledPrograms) -> None:
        """Copies (source, destination) blocks in every layer. No destination is another pair's source."""
        for first in range(0, len(blocks), COPY_BATCH):
            pairs = np.zeros((2, COPY_BATCH), np.int32)  # padding copies the null block onto itself
            batch = blocks[first : first + COPY_BATCH]
            pairs[:, : len(batch)] = np.asarray(batch, np.int32).T
            sources, destinations = jax.device_put((pairs[0], pairs[1]))
            self.caches = tuple(
                programs("copy_blocks", COPY_BATCH, cache, sources, destinations) for cache in self.caches
            )


def num_host_blocks(config: EngineConfig, block_size: int, block_bytes: int) -> int:
    """Returns how many blocks fit swap_space GiB, no more than full sequences could use.

    0 if there would be none but the null block.
    """
    num_blocks = min(int(config.cache.swap_space * 2**30) // block_bytes, _num_usable_blocks(config, block_size))
    return num_blocks if num_blocks >= 2 else 0


def bytes_per_block(config: EngineConfig, block_size: int, dtype: jnp.dtype) -> int:
    """Returns the size of one block over all layers: keys and values, layers, tokens, KV heads, head dim."""
    model = config.model
    row = model.num_key_value_heads * model.head_dim * jnp.dtype(dtype).itemsize
    return 2 * model.num_hidden_layers * block_size * row


def _num_blocks(config: EngineConfig, block_size: int, block_bytes: int, platform: str) -> int:
    """Decides how many blocks to allocate: what memory gives, but no more than full sequences could use."""
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    budget = cache.kv_cache_memory_bytes or _default_budget(cache, platform)
    affordable = budget // block_bytes
    if affordable < 2:
        raise ConfigError(
            f"the KV cache needs at least 2 blocks of {block_bytes} bytes, got {budget} bytes; "
            "raise --kv-cache-memory or lower --block-size"
        )
    return min(affordable, _num_usable_blocks(config, block_size))


def _num_usable_blocks(config: EngineConfig, block_size: int) -> int:
    return config.scheduler.max_num_seqs * cdiv(config.scheduler.max_model_len, block_size) + 1


def _default_budget(cache: CacheConfig, platform: str) -> int:
    if platform == "cpu":
        return DEFAULT_CPU_KV_CACHE_BYTES
    stats = jax.local_devices()[0].memory_stats() or {}
    total, used = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
    budget = int(total * cache.gpu_memory_utilization) - used
    if budget <= 0:
        raise ConfigError(
            f"no device memory is left for the KV cache: {total} bytes x gpu_memory_utilization "
            f"{cache.gpu_memory_utilization} - {used} bytes in use; raise --gpu-memory-utilization or "
            "set --kv-cache-memory"
        )
    return budget
