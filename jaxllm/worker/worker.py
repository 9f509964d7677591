"""Worker: one mesh. Starts everything on it in order, then runs steps."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.exceptions import ConfigError, DeviceError
from jaxllm.layers.attention import LayerCache
from jaxllm.logger import get_logger
from jaxllm.messages import KVCacheInfo, ModelRunnerOutput, SchedulerOutput
from jaxllm.model_loader.loader import load_model
from jaxllm.models.causal_lm import ModelPart, model_parts
from jaxllm.quantization import SCHEMES
from jaxllm.worker.buckets import pick_bucket
from jaxllm.worker.cache_engine import (
    BlockCounts,
    CacheEngine,
    block_size_of,
    count_blocks,
    layer_spec,
    needs_profile,
)
from jaxllm.worker.compile_counter import CompileCounter
from jaxllm.worker.input_batch import InputBatch
from jaxllm.worker.kv_calibration import calibrate_cache
from jaxllm.worker.memory_profile import MemoryProfile, dummy_batch_lens
from jaxllm.worker.model_runner import ModelRunner
from jaxllm.worker.number_formats import describe_formats
from jaxllm.worker.padding_cost import padding_costs
from jaxllm.worker.pipeline import Pipeline, Stage
from jaxllm.worker.plan import cache_dtype_of, hidden_dtype_of, layers_per_segment, program_shapes
from jaxllm.worker.programs import ProgramShapes, list_programs
from jaxllm.worker.stage_exchange import StageExchange, agree_on_min
from jaxllm.worker.step_fn import StepModel, split_model
from jaxllm.worker.warmup import compile_programs, enable_compile_cache, measure_activations
from pallas_kernels import describe_backends
from pallas_kernels.backends import choose_backend
from pallas_kernels.paged_attention.block_sizes import check_block_tables
from sharding.mesh import is_mine, make_mesh, stage_meshes

_logger = get_logger(__name__)
_ANY_NUMBER = 2**31 - 1  # of blocks: the processes that know agree on fewer


class Worker:
    """Owns the devices, the weights, the KV cache and the compiled programs.

    Call `initialize` once, then `execute_model` step after step. Where its devices belong to several processes, each
    has a Worker, and all make the same calls in the same order.

    Args:
      config: The engine's configuration.
      devices: What the model is on, tensor_parallel_size x pipeline_parallel_size devices, stage after stage; None
        takes the data parallel replica's share of those that JAX has.
    """

    def __init__(self, config: EngineConfig, devices: Sequence[jax.Device] | None = None) -> None:
        self._config = config
        self._devices = devices
        self._model_runner: ModelRunner | None = None

    def initialize(self) -> KVCacheInfo:
        """Loads the weights, allocates the KV cache and compiles every program.

        Raises:
          ModelLoadError: The checkpoint is damaged or doesn't fit its config.
          ConfigError: There are too few devices, the KV cache doesn't fit in memory, or its block tables not in a
            TPU's.
          DeviceError: A device is absent, held by another process, or out of memory.
        """
        enable_compile_cache()
        platform = _platform()
        try:
            return self._initialize(platform)
        except jax.errors.JaxRuntimeError as error:
            raise DeviceError(f"the device failed while the model was loaded: {_first_line(error)}") from error

    def _initialize(self, platform: str) -> KVCacheInfo:
        config, scheduler = self._config, self._config.scheduler
        mesh = make_mesh(mesh_devices(config, self._devices), config.parallel.pipeline_parallel_size)
        dtype = compute_dtype(config.dtype, platform)
        hidden_dtype = hidden_dtype_of(dtype, platform)
        cache_dtype = cache_dtype_of(config, dtype)
        _check_block_tables(config, platform)
        _describe(config, mesh, dtype, cache_dtype, platform)
        shapes = program_shapes(config, platform, hidden_dtype)
        parts = model_parts(config.model.num_hidden_layers, config.parallel.pipeline_parallel_size)
        meshes = stage_meshes(mesh)
        models = self._load_stages(mesh, parts, dtype, cache_dtype, platform)
        counts = [
            self._count_blocks(model, mine, shapes, cache_dtype, platform, len(part.layers))
            for model, mine, part in zip(models, meshes, parts, strict=True)
        ]
        num_blocks, num_host_blocks = agree_on_min([min(column) for column in zip(*counts, strict=True)], mesh)
        stages: list[Stage | None] = []
        exchange = StageExchange(mesh, shapes)
        exchange_programs = exchange.list_programs()
        num_programs = len(exchange_programs)
        for model, mine, part in zip(models, meshes, parts, strict=True):
            if model is None:
                stages.append(None)
                continue
            cache_engine = CacheEngine(config, mine, cache_dtype, platform, len(part.layers), num_blocks)
            programs = list_programs(model, cache_engine.caches[0], shapes, mine)
            stages.append(Stage(mine, model, cache_engine, compile_programs(programs)))
            num_programs += len(programs)
        if exchange_programs:
            exchange.use(compile_programs(exchange_programs))
        _logger.info("host KV cache: %d blocks", num_host_blocks)
        block_size = block_size_of(config, platform)
        input_batch = InputBatch(
            scheduler.max_num_seqs,
            shapes.max_num_draws,
            scheduler.max_model_len,
            block_size,
            shapes.ladder,
            num_stages=len(stages),
        )
        pipeline = Pipeline(stages, exchange)
        self._model_runner = ModelRunner(pipeline, input_batch, shapes.max_num_draws, CompileCounter())
        return KVCacheInfo(
            num_blocks,
            block_size,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            num_host_blocks,
            num_programs,
        )

    def _load_stages(
        self, mesh: Mesh, parts: Sequence[ModelPart], dtype: jnp.dtype, cache_dtype: jnp.dtype, platform: str
    ) -> list[StepModel | None]:
        """Loads the stages that this process has devices of; None stands for the others."""
        config, hidden_dtype = self._config, hidden_dtype_of(dtype, platform)
        models = [
            load_model(config, mine, dtype, hidden_dtype, part) if is_mine(mine) else None
            for mine, part in zip(stage_meshes(mesh), parts, strict=True)
        ]
        if cache_dtype == jnp.int8:
            calibrate_cache(config, mesh, models, hidden_dtype, platform)
        num_layers = layers_per_segment(config, platform)
        return [
            None if model is None else split_model(model, num_layers, part)
            for model, part in zip(models, parts, strict=True)
        ]

    def _count_blocks(
        self,
        model: StepModel | None,
        mesh: Mesh,
        shapes: ProgramShapes,
        cache_dtype: jnp.dtype,
        platform: str,
        num_layers: int,
    ) -> BlockCounts:
        """Returns what fits a stage; of another process's stage, what would if memory were no matter."""
        if model is None and needs_profile(self._config.cache, platform):
            return BlockCounts(_ANY_NUMBER, _ANY_NUMBER)
        profile = None
        if model is not None and needs_profile(self._config.cache, platform):
            # Any number of blocks does; the true one isn't known before the activations are.
            layer = layer_spec(self._config, mesh, cache_dtype, platform, num_blocks=shapes.blocks_per_seq + 1)
            profile = _profile_memory(self._config, model, layer, shapes, mesh)
        return count_blocks(self._config, mesh, cache_dtype, platform, num_layers, profile)

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step. `initialize` must have returned."""
        assert self._model_runner is not None
        return self._model_runner.execute_model(step)

    def shutdown(self) -> None:
        """Lets go of weights, KV cache and programs; their memory is free once nobody else holds them."""
        self._model_runner = None


def mesh_devices(config: EngineConfig, devices: Sequence[jax.Device] | None) -> Sequence[jax.Device]:
    """Returns the devices of the mesh.

    Raises:
      ConfigError: There are too few, or too many stages for the layers.
    """
    parallel = config.parallel
    available = jax.devices() if devices is None else devices
    first = parallel.world_size * (parallel.data_parallel_rank or 0 if devices is None else 0)
    needed = parallel.world_size * (parallel.data_parallel_size if devices is None else 1)
    if len(available) < needed:
        raise ConfigError(
            f"tensor_parallel_size={parallel.tensor_parallel_size} x pipeline_parallel_size="
            f"{parallel.pipeline_parallel_size} x data_parallel_size={parallel.data_parallel_size} needs {needed} "
            f"devices, there are {len(available)}; set --tensor-parallel-size, --pipeline-parallel-size and "
            "--data-parallel-size"
            + (f", or JAX_NUM_CPU_DEVICES={needed} to try it on CPU" if available[0].platform == "cpu" else "")
        )
    if parallel.pipeline_parallel_size > config.model.num_hidden_layers:
        raise ConfigError(
            f"pipeline_parallel_size must be at most {config.model.num_hidden_layers}, the model's layers, "
            f"got {parallel.pipeline_parallel_size}; set --pipeline-parallel-size"
        )
    return available[first : first + parallel.world_size]


def _describe(config: EngineConfig, mesh: Mesh, dtype: jnp.dtype, cache_dtype: jnp.dtype, platform: str) -> None:
    device_kind = mesh.devices.ravel()[0].device_kind
    _logger.info("%s, %s, compute dtype %s, %s", platform, device_kind, dtype.name, describe_backends())
    if mesh.size > 1:
        _logger.info("mesh: %s", ", ".join(f"{name} {size}" for name, size in mesh.shape.items()))
    scheme = SCHEMES.get(config.quantization or "", config.model.stored_scheme)
    for line in describe_formats(scheme, cache_dtype, mesh.devices.ravel()[0]):
        _logger.info("%s", line)
    for line in padding_costs(config.model, config.parallel.tensor_parallel_size):
        _logger.info("%s", line)


def _check_block_tables(config: EngineConfig, platform: str) -> None:
    """The TPU kernels read block tables from a small memory of scalars; better to say so before the weights load."""
    if choose_backend() == "tpu":
        scheduler = config.scheduler
        try:
            check_block_tables(scheduler.max_num_seqs, scheduler.max_model_len, block_size_of(config, platform))
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _profile_memory(
    config: EngineConfig, model: StepModel, layer: LayerCache, shapes: ProgramShapes, mesh: Mesh
) -> MemoryProfile:
    """Returns the terms of the KV budget. Call it when the weights are loaded and the KV cache isn't allocated yet."""
    lens = dummy_batch_lens(config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs)
    size = pick_bucket(shapes.ladder, sum(lens))
    _logger.info(
        "largest step: %d sequences of %d to %d tokens, %d tokens padded to %d",
        len(lens),
        lens[-1],
        lens[0],
        sum(lens),
        size,
    )
    num_activation_bytes = measure_activations(list_programs(model, layer, replace(shapes, ladder=(size,)), mesh))
    total_bytes, used_bytes = _device_memory(mesh)
    return MemoryProfile(
        total_bytes=total_bytes,
        utilization=config.cache.gpu_memory_utilization,
        weight_bytes=used_bytes,
        activation_bytes=num_activation_bytes,
    )


def _platform() -> str:
    try:
        return jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # the second is what JAX raises where a plug-in is missing
        wanted = jax.config.values.get("jax_platforms")
        asked = f" with JAX_PLATFORMS={wanted}" if wanted else ""
        raise DeviceError(f"no device can be used{asked}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _device_memory(mesh: Mesh) -> tuple[int, int]:
    """Returns a device's (total, used) bytes, the least and the most of this process's; zeros where they don't say."""
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    return min(each.get("bytes_limit", 0) for each in stats), max(each.get("bytes_in_use", 0) for each in stats)


def compute_dtype(name: str, platform: str) -> jnp.dtype:
    """Resolves "auto": float32 on CPU, where XLA's bfloat16 products are 5 to 15 times slower; else bfloat16."""
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)
