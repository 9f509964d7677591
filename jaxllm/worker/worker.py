"""Worker: one mesh slice. Starts everything on it in order, then runs steps."""

import jax
import jax.numpy as jnp

from jaxllm.config import EngineConfig
from jaxllm.intmath import cdiv
from jaxllm.logger import get_logger
from jaxllm.messages import KVCacheInfo, ModelRunnerOutput, SchedulerOutput
from jaxllm.model_loader.loader import load_model
from jaxllm.worker.buckets import token_ladder
from jaxllm.worker.cache_engine import CacheEngine
from jaxllm.worker.input_batch import InputBatch
from jaxllm.worker.model_runner import ModelRunner
from jaxllm.worker.programs import ProgramShapes, list_programs
from jaxllm.worker.step_fn import split_model
from jaxllm.worker.warmup import compile_programs, enable_compile_cache
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
          ConfigError: The KV cache doesn't fit in memory.
        """
        config, scheduler = self._config, self._config.scheduler
        enable_compile_cache()
        platform = jax.default_backend()
        mesh = make_mesh(jax.local_devices()[:1])
        dtype = _compute_dtype(config.dtype, platform)
        _logger.info("%s, %s, compute dtype %s", platform, mesh.devices.ravel()[0].device_kind, dtype.name)
        layers_per_segment = 1 if platform == "cpu" else config.model.num_hidden_layers
        model = split_model(load_model(config, mesh, dtype), layers_per_segment)
        cache_engine = CacheEngine(config, mesh, dtype, platform)
        ladder = token_ladder(scheduler.max_num_batched_tokens, platform)
        shapes = ProgramShapes(
            ladder=ladder,
            max_num_seqs=scheduler.max_num_seqs,
            blocks_per_seq=cdiv(scheduler.max_model_len, cache_engine.block_size),
            vocab_size=config.model.vocab_size,
            hidden_size=config.model.hidden_size,
            dtype=dtype,
        )
        programs = compile_programs(list_programs(model, cache_engine.caches[0], shapes, mesh))
        input_batch = InputBatch(scheduler.max_num_seqs, scheduler.max_model_len, cache_engine.block_size, ladder)
        self._model_runner = ModelRunner(model, cache_engine, input_batch, programs, scheduler.max_num_seqs)
        return KVCacheInfo(
            cache_engine.num_blocks,
            cache_engine.block_size,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            cache_engine.num_host_blocks,
        )

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step. `initialize` must have returned."""
        assert self._model_runner is not None
        return self._model_runner.execute_model(step)

    def shutdown(self) -> None:
        """Lets go of weights, KV cache and programs; their memory is free once nobody else holds them."""
        self._model_runner = None


def _compute_dtype(name: str, platform: str) -> jnp.dtype:
    """Resolves "auto": float32 on CPU, where XLA's bfloat16 products are 5 to 15 times slower; else bfloat16."""
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)
