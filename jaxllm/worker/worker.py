"""Worker: one mesh slice. Starts everything on it in order, then runs steps."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.config import KV_CACHE_DTYPES, EngineConfig
from jaxllm.exceptions import ConfigError, DeviceError
from jaxllm.intmath import cdiv
from jaxllm.layers.attention import LayerCache
from jaxllm.logger import get_logger
from jaxllm.messages import KVCacheInfo, ModelRunnerOutput, SchedulerOutput
from jaxllm.model_loader.loader import load_model
from jaxllm.quantization import SCHEMES
from jaxllm.worker.buckets import max_num_draws, pick_bucket, token_ladder
from jaxllm.worker.cache_engine import CacheEngine, block_size_of, layer_spec, layout_of, needs_profile
from jaxllm.worker.compile_counter import CompileCounter
from jaxllm.worker.input_batch import InputBatch
from jaxllm.worker.kv_calibration import calibrate_cache
from jaxllm.worker.memory_profile import MemoryProfile, dummy_batch_lens
from jaxllm.worker.model_runner import ModelRunner
from jaxllm.worker.number_formats import describe_formats
from jaxllm.worker.programs import ProgramShapes, list_programs
from jaxllm.worker.step_fn import StepModel, split_model
from jaxllm.worker.warmup import compile_programs, enable_compile_cache, measure_activations
from pallas_kernels import describe_backends
from pallas_kernels.backends import choose_backend
from pallas_kernels.paged_attention.block_sizes import check_block_tables
from sharding.mesh import make_mesh

_logger = get_logger(__name__)


class Worker:
    """Owns the devices, the weights, the KV cache and the compiled programs.

    Call `initialize` once, then `execute_model` step after step.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._model_runner: ModelRunner | None = None

    def initialize(self) -> KVCacheInfo:
        """Loads the weights, allocates the KV cache and compiles every program.

        Raises:
          ModelLoadError: The checkpoint is damaged or doesn't fit its config.
          ConfigError: The KV cache doesn't fit in memory, or its block tables not in a TPU's.
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
        mesh = make_mesh(jax.local_devices()[:1])
        dtype = _compute_dtype(config.dtype, platform)
        # XLA:CPU computes element by element in float32 anyway; converting back and forth would cost more.
        hidden_dtype = jnp.dtype(jnp.float32) if platform == "cpu" else dtype
        cache_dtype = _cache_dtype(config.cache.cache_dtype, hidden_dtype)
        device = mesh.devices.ravel()[0]
        _logger.info("%s, %s, compute dtype %s, %s", platform, device.device_kind, dtype.name, describe_backends())
        for line in describe_formats(SCHEMES.get(config.quantization or ""), cache_dtype, device):
            _logger.info(line)
        _check_block_tables(config, platform)
        layers_per_segment = 1 if platform == "cpu" else config.model.num_hidden_layers
        loaded = load_model(config, mesh, dtype, hidden_dtype)
        if cache_dtype == jnp.int8:
            layer = layer_spec(config, mesh, cache_dtype, platform, num_blocks=1)
            layout = layout_of(config, cache_dtype, platform)
            calibrate_cache(loaded, layout, len(layer), config.model.vocab_size, scheduler.max_model_len, hidden_dtype)
        model = split_model(loaded, layers_per_segment)
        ladder = token_ladder(scheduler.max_num_batched_tokens, platform)
        shapes = ProgramShapes(
            ladder=ladder,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_draws=max_num_draws(scheduler.max_num_seqs, platform),
            blocks_per_seq=cdiv(scheduler.max_model_len, block_size_of(config, platform)),
            vocab_size=config.model.vocab_size,
            hidden_size=config.model.hidden_size,
            dtype=hidden_dtype,
        )
        profile = None
        if needs_profile(config.cache, platform):
            # Any number of blocks does; the true one isn't known before the activations are.
            layer = layer_spec(config, mesh, cache_dtype, platform, num_blocks=shapes.blocks_per_seq + 1)
            profile = _profile_memory(config, model, layer, shapes, mesh)
        cache_engine = CacheEngine(config, mesh, cache_dtype, platform, profile)
        all_programs = list_programs(model, cache_engine.caches[0], shapes, mesh)
        programs = compile_programs(all_programs)
        input_batch = InputBatch(
            scheduler.max_num_seqs, shapes.max_num_draws, scheduler.max_model_len, cache_engine.block_size, ladder
        )
        self._model_runner = ModelRunner(
            model, cache_engine, input_batch, programs, shapes.max_num_draws, CompileCounter()
        )
        return KVCacheInfo(
            cache_engine.num_blocks,
            cache_engine.block_size,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            cache_engine.num_host_blocks,
            len(all_programs),
        )

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step. `initialize` must have returned."""
        assert self._model_runner is not None
        return self._model_runner.execute_model(step)

    def shutdown(self) -> None:
        """Lets go of weights, KV cache and programs; their memory is free once nobody else holds them."""
        self._model_runner = None


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
    total_bytes, used_bytes = _device_memory()
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


def _device_memory() -> tuple[int, int]:
    """Returns the first device's (total, used) bytes; zeros where it doesn't say."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)


def _compute_dtype(name: str, platform: str) -> jnp.dtype:
    """Resolves "auto": float32 on CPU, where XLA's bfloat16 products are 5 to 15 times slower; else bfloat16."""
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def _cache_dtype(name: str, hidden_dtype: jnp.dtype) -> jnp.dtype:
    """Resolves a name of KV_CACHE_DTYPES."""
    resolved = KV_CACHE_DTYPES[name]
    return hidden_dtype if resolved == "auto" else jnp.dtype(resolved)
