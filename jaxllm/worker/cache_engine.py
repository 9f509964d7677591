"""CacheEngine: owns the KV arrays in device memory, allocated once, and moves blocks by id, to the host too."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxllm.config import DEFAULT_CPU_KV_CACHE_BYTES, CacheConfig, EngineConfig
from jaxllm.exceptions import ConfigError
from jaxllm.intmath import cdiv
from jaxllm.layers.attention import LayerCache
from jaxllm.logger import get_logger
from jaxllm.worker.host_cache import HostCache
from jaxllm.worker.memory_profile import MemoryProfile, check_fits, num_device_blocks, num_host_blocks
from jaxllm.worker.programs import COPY_BATCH, CompiledPrograms
from pallas_kernels import choose_backend
from pallas_kernels.paged_attention import KVLayout
from sharding.partition import put, replicated
from sharding.rules import Axis, num_shards, sharding_for
from sharding.split import HeadSplit

_logger = get_logger(__name__)
_DEFAULT_BLOCK_SIZE = {"cpu": 64, "gpu": 16, "tpu": 128}


class BlockCounts(NamedTuple):
    """Blocks of a KV cache."""

    device: int  # N
    host: int  # or 0


class CacheEngine:
    """The KV cache of a stage's layers, in the layout of the kernels' backend. Block 0 is the null block.

    Devices share the KV heads, so that each has a part of every block.

    Attributes:
      caches: One LayerCache a layer. A step takes them (they are donated) and puts its result back.
      num_blocks: N.
      block_size: P.

    Args:
      config: The engine's configuration.
      mesh: Where the arrays lie.
      dtype: Of keys and values.
      platform: "cpu", "gpu" or "tpu".
      num_layers: Layers of the stage.
      num_blocks: The same on every stage.
    """

    def __init__(
        self, config: EngineConfig, mesh: Mesh, dtype: jnp.dtype, platform: str, num_layers: int, num_blocks: int
    ) -> None:
        self.block_size, self.num_blocks = block_size_of(config, platform), num_blocks
        layer = layer_spec(config, mesh, dtype, platform, num_blocks)
        self.caches = tuple(
            tuple(jnp.zeros(spec.shape, spec.dtype, device=spec.sharding) for spec in layer) for _ in range(num_layers)
        )
        self._inputs = replicated(mesh)
        self._host_cache = HostCache(_sharding_of(layer), is_pinned=platform != "cpu")
        num_bytes = _block_bytes(config, mesh, dtype, platform, num_layers)
        _logger.info(
            "KV cache: %d blocks of %d tokens and %d bytes a device, %.2f GiB",
            num_blocks,
            self.block_size,
            num_bytes,
            num_blocks * num_bytes / 2**30,
        )

    def swap_out(self, blocks: Sequence[tuple[int, int]], programs: CompiledPrograms) -> None:
        """Copies (device, host) blocks of every layer to the host."""
        for first in range(0, len(blocks), COPY_BATCH):
            batch = blocks[first : first + COPY_BATCH]
            ids = np.zeros(COPY_BATCH, np.int32)  # padding reads the null block
            ids[: len(batch)] = [source for source, _ in batch]
            sources = put(ids, self._inputs)
            rows = [programs("gather_blocks", COPY_BATCH, cache, sources) for cache in self.caches]
            self._host_cache.store([destination for _, destination in batch], rows)

    def swap_in(self, blocks: Sequence[tuple[int, int]], programs: CompiledPrograms) -> None:
        """Copies (host, device) blocks of every layer to the device; they leave the host."""
        for ids, rows in self._host_cache.take(blocks):
            destinations = put(ids, self._inputs)
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
            sources, destinations = put((pairs[0], pairs[1]), self._inputs)
            self.caches = tuple(
                programs("copy_blocks", COPY_BATCH, cache, sources, destinations) for cache in self.caches
            )


def block_size_of(config: EngineConfig, platform: str) -> int:
    """Returns P: what was asked for, or the platform's default."""
    return config.cache.block_size or _DEFAULT_BLOCK_SIZE.get(platform, 16)


def layer_spec(config: EngineConfig, mesh: Mesh, dtype: jnp.dtype, platform: str, num_blocks: int) -> LayerCache:
    """Returns one layer's cache, of all devices together, with jax.ShapeDtypeStruct in place of arrays."""
    layout = layout_of(config, mesh, dtype, platform)
    axes: list[Axis] = [None] * 4
    if not config.model.has_latent_cache:  # whose one head all queries need
        axes[layout.head_axis] = "kv_heads"
    shapes = [list(shape) for shape in layout.shapes(num_blocks)]
    for shape in shapes:
        shape[layout.head_axis] *= num_shards(mesh, axes[layout.head_axis])
    specs: Any = tuple(
        jax.ShapeDtypeStruct(shape, layout.array_dtype, sharding=sharding_for(mesh, axes, shape)) for shape in shapes
    )
    return specs


def _sharding_of(layer: LayerCache) -> NamedSharding:
    sharding = layer[0].sharding
    assert isinstance(sharding, NamedSharding)
    return sharding


def layout_of(config: EngineConfig, mesh: Mesh, dtype: jnp.dtype, platform: str) -> KVLayout:
    """Returns how each device's part of a layer's cache lies in its memory."""
    model = config.model
    heads = HeadSplit(model.num_attention_heads, model.num_key_value_heads, num_shards(mesh, "kv_heads"))
    return KVLayout(
        backend=choose_backend(),
        block_size=block_size_of(config, platform),
        num_kv_heads=1 if model.has_latent_cache else heads.kv_heads_per_shard,
        head_dim=model.head_dim,
        dtype=dtype,
        values_are_keys=model.has_latent_cache,
    )


def _block_bytes(config: EngineConfig, mesh: Mesh, dtype: jnp.dtype, platform: str, num_layers: int) -> int:
    """Returns the bytes of one block of num_layers layers on each device."""
    return num_layers * layout_of(config, mesh, dtype, platform).block_bytes


def needs_profile(cache: CacheConfig, platform: str) -> bool:
    """Whether the number of blocks follows from the device's memory: nobody named it, and this is no CPU."""
    return platform != "cpu" and cache.num_gpu_blocks_override is None and cache.kv_cache_memory_bytes is None


def count_blocks(
    config: EngineConfig,
    mesh: Mesh,
    dtype: jnp.dtype,
    platform: str,
    num_layers: int,
    profile: MemoryProfile | None = None,
) -> BlockCounts:
    """Returns how many blocks of num_layers layers a stage's devices, and the host beside each of them, can hold.

    Args:
      config: The engine's configuration.
      mesh: The stage's.
      dtype: Of keys and values.
      platform: "cpu", "gpu" or "tpu".
      num_layers: Layers of the stage.
      profile: A device's memory, where needs_profile() says that it decides.

    Raises:
      ConfigError: The memory is too small.
    """
    block_size = block_size_of(config, platform)
    num_bytes = _block_bytes(config, mesh, dtype, platform, num_layers)
    return BlockCounts(
        _num_blocks(config, block_size, num_bytes, profile), host_blocks_of(config, block_size, num_bytes)
    )


def _num_blocks(config: EngineConfig, block_size: int, bytes_per_block: int, profile: MemoryProfile | None) -> int:
    """Decides how many blocks to allocate: what memory gives, but no more than full sequences could use."""
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    if profile is not None:
        _logger.info("KV budget: %s", profile)
        check_fits(profile, bytes_per_block, block_size, config.scheduler.max_model_len)
        budget = profile.kv_bytes
    else:
        budget = cache.kv_cache_memory_bytes or DEFAULT_CPU_KV_CACHE_BYTES
    affordable = num_device_blocks(budget, bytes_per_block)
    if affordable < 2:
        raise ConfigError(
            f"the KV cache needs at least 2 blocks of {bytes_per_block} bytes, got {budget} bytes; "
            "raise --kv-cache-memory or lower --block-size"
        )
    usable = _num_usable_blocks(config, block_size)
    _logger.info(
        "%d bytes for KV / %d bytes a block = %d device blocks; max_num_seqs sequences of max_model_len use at most %d",
        budget,
        bytes_per_block,
        affordable,
        usable,
    )
    return min(affordable, usable)


def host_blocks_of(config: EngineConfig, block_size: int, bytes_per_block: int) -> int:
    """Returns how many blocks fit swap_space GiB, no more than full sequences could use; 0 if only the null block."""
    affordable = num_host_blocks(int(config.cache.swap_space * 2**30), bytes_per_block)
    num_blocks = min(affordable, _num_usable_blocks(config, block_size))
    return num_blocks if num_blocks >= 2 else 0


def _num_usable_blocks(config: EngineConfig, block_size: int) -> int:
    return config.scheduler.max_num_seqs * cdiv(config.scheduler.max_model_len, block_size) + 1
