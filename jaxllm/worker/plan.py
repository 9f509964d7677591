"""What a worker would run, from the configuration alone: no weights, on a mesh whose devices need not exist here."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.config import KV_CACHE_DTYPES, EngineConfig
from jaxllm.intmath import cdiv
from jaxllm.layers.attention import LayerCache
from jaxllm.model_loader.loader import abstract_model
from jaxllm.models.causal_lm import CausalLM, ModelPart, model_parts
from jaxllm.worker.buckets import max_num_draws, token_ladder
from jaxllm.worker.cache_engine import block_size_of, layer_spec
from jaxllm.worker.programs import Program, ProgramShapes, list_programs
from jaxllm.worker.step_fn import split_model
from sharding.mesh import stage_meshes


class StagePlan(NamedTuple):
    """One pipeline stage before anything is loaded. Arrays are jax.ShapeDtypeStruct with shardings."""

    mesh: Mesh
    part: ModelPart
    model: CausalLM  # weights that the stage doesn't hold have no sharding
    cache: LayerCache  # of each layer
    programs: list[Program]


def plan_stages(config: EngineConfig, mesh: Mesh, platform: str, dtype: jnp.dtype, num_blocks: int) -> list[StagePlan]:
    """Returns what each stage of a mesh would hold and run.

    Args:
      config: The engine's configuration. Its parallel sizes aren't read: the mesh has them.
      mesh: Of sharding.mesh.make_mesh; its devices may be those of a topology.
      platform: "cpu", "gpu" or "tpu". Set JAXLLM_ATTENTION where the kernels are to be another platform's.
      dtype: Of the weights.
      num_blocks: Blocks of the KV cache.
    """
    hidden_dtype = hidden_dtype_of(dtype, platform)
    shapes = program_shapes(config, platform, hidden_dtype)
    plans = []
    for mine, part in zip(
        stage_meshes(mesh), model_parts(config.model.num_hidden_layers, mesh.shape["stage"]), strict=True
    ):
        model = abstract_model(config, mine, dtype, hidden_dtype, part)
        cache = layer_spec(config, mine, cache_dtype_of(config, dtype), platform, num_blocks)
        split = split_model(model, layers_per_segment(config, platform), part)
        plans.append(StagePlan(mine, part, model, cache, list_programs(split, cache, shapes, mine)))
    return plans


def program_shapes(config: EngineConfig, platform: str, hidden_dtype: jnp.dtype) -> ProgramShapes:
    """Returns what fixes the shape of every program."""
    scheduler = config.scheduler
    return ProgramShapes(
        ladder=token_ladder(scheduler.max_num_batched_tokens, platform),
        max_num_seqs=scheduler.max_num_seqs,
        max_num_draws=max_num_draws(scheduler.max_num_seqs, platform),
        blocks_per_seq=cdiv(scheduler.max_model_len, block_size_of(config, platform)),
        vocab_size=config.model.vocab_size,
        hidden_size=config.model.hidden_size,
        dtype=hidden_dtype,
    )


def layers_per_segment(config: EngineConfig, platform: str) -> int:
    """Returns how many layers run as one program; see worker/step_fn.py."""
    return 1 if platform == "cpu" else config.model.num_hidden_layers


def hidden_dtype_of(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """Returns the dtype of what flows from layer to layer.

    XLA:CPU computes element by element in float32 anyway; converting back and forth would cost more.
    """
    return jnp.dtype(jnp.float32) if platform == "cpu" else dtype


def cache_dtype_of(config: EngineConfig, dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of the KV cache of a model that computes in dtype."""
    name = KV_CACHE_DTYPES[config.cache.cache_dtype]
    return dtype if name == "auto" else jnp.dtype(name)
