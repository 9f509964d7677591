"""Scales of a KV cache of int8: measured once, when the model is loaded, and kept in its layers.

Some dimensions of keys are tens of times larger than the rest, in the same heads and dimensions whatever the text is:
a scale for each of them is what makes eight bits enough. So a text is run with a cache of floats, and the largest
magnitude of each dimension becomes the largest number. It has to be a text: on random tokens models make other keys,
and scales from those cost SmolLM2 five times as much.

What counts of a key is the length of each pair that is rotated together: at positions far beyond the text's, what
was small in one of the two is large. Without that, SmolLM2's perplexity grew by three quarters after 2,000 tokens.

Stages are measured one after the other, on their devices, with the text's hidden states handed on from each to the
next; devices that share a stage's heads measure theirs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxllm.config import EngineConfig
from jaxllm.layers.attention import Attention
from jaxllm.layers.forward_batch import ForwardBatch
from jaxllm.layers.latent_attention import LatentAttention
from jaxllm.model_loader.checkpoint import open_model
from jaxllm.models.causal_lm import CausalLM, ModelPart, model_parts
from jaxllm.tokenizer.loader import open_tokenizer_of
from jaxllm.worker.cache_engine import layout_of
from jaxllm.worker.calibration_text import CALIBRATION_TEXT
from jaxllm.worker.plan import program_shapes
from jaxllm.worker.programs import Program
from jaxllm.worker.stage_exchange import StageExchange
from jaxllm.worker.step_fn import LayerRunner, split_model
from jaxllm.worker.warmup import compile_programs
from jaxllm.worker.whole_texts import batch_of
from pallas_kernels.paged_attention import KVLayout
from sharding.mesh import stage_meshes
from sharding.partition import put, replicated
from sharding.rules import sharding_for

_LARGEST = 127 / 1.25  # room for what the text lacks: on 3,000 tokens SmolLM2 loses least with a quarter


def calibrate_cache(
    config: EngineConfig, mesh: Mesh, models: Sequence[CausalLM | None], hidden_dtype: jnp.dtype, platform: str
) -> None:
    """Puts each layer's scales into its attention. Every process of the mesh calls this.

    Args:
      config: Of the engine; names the model, whose tokenizer is used.
      mesh: Of all stages.
      models: Each stage's, loaded, its layers' cache_scales being ones; None where it is another process's.
      hidden_dtype: Of what flows from layer to layer, and of the cache of floats.
      platform: "cpu", "gpu" or "tpu".
    """
    token_ids = _token_ids(config)
    shapes = replace(program_shapes(config, platform, hidden_dtype), ladder=(len(token_ids),))
    exchange = StageExchange(mesh, shapes)
    if exchange_programs := exchange.list_programs():
        exchange.use(compile_programs(exchange_programs))
    parts, meshes = model_parts(config.model.num_hidden_layers, len(models)), stage_meshes(mesh)
    hidden: jax.Array | None = None
    for index, (model, part, mine) in enumerate(zip(models, parts, meshes, strict=True)):
        if index > 0:
            hidden = exchange.hand_on(index - 1, len(token_ids), hidden)
        if model is None:
            hidden = None
            continue
        layout = layout_of(config, mine, hidden_dtype, platform)
        hidden = _calibrate_stage(model, part, mine, layout, token_ids, hidden)


def _token_ids(config: EngineConfig) -> np.ndarray:
    tokenizer = open_tokenizer_of(open_model(str(config.model_path), config.load_format), config)
    return np.array(tokenizer.encode(CALIBRATION_TEXT)[: config.scheduler.max_model_len])


def _calibrate_stage(
    model: CausalLM,
    part: ModelPart,
    mesh: Mesh,
    layout: KVLayout,
    token_ids: np.ndarray,
    hidden: jax.Array | None,
) -> jax.Array:
    """Calibrates one stage's layers, given the hidden states that the one before made. Returns those that it makes."""
    split, size = split_model(model, 1, part), len(token_ids)
    texts = batch_of(token_ids[None], layout.block_size)
    num_blocks = 1 + texts.block_tables.size
    batch: ForwardBatch = put(texts, replicated(mesh))
    if hidden is None:
        weights = split.embed_weights, batch.token_ids, batch.positions
        hidden = Program("embed", size, split.embed, weights, mesh=mesh).compile()(*weights)
    compiled: dict[int, Callable[..., Any]] = {}
    for layer, segment in zip(model.layers, split.segments, strict=True):
        attention = _attention_of(layer)
        arguments = segment.weights, hidden, batch
        if segment.kind not in compiled:
            function = _measured(split.run_layers[segment.kind], attention, layout, num_blocks)
            axes = attention.cache_scales.get_metadata("logical_axes")
            results = PartitionSpec(), sharding_for(mesh, axes).spec
            program = Program("measured", size, function, arguments, mesh=mesh, results=results)
            compiled[segment.kind] = program.compile()
        hidden, scales = compiled[segment.kind](*arguments)
        attention.cache_scales[...] = scales
    assert hidden is not None
    return hidden


def _measured(
    run: LayerRunner, attention: Attention | LatentAttention, layout: KVLayout, num_blocks: int
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns (weights, hidden, batch) -> (hidden, the layer's cache_scales) for one kind of layer."""

    def measure(weights: Any, hidden: jax.Array, batch: ForwardBatch) -> tuple[jax.Array, jax.Array]:
        hidden, (cache,) = run(weights, hidden, batch, (layout.zeros(num_blocks),))
        cached = [array[1:].astype(jnp.float32) for array in layout.unpack(cache)]  # block 0 is nobody's
        largest = attention.reach(*cached)
        return hidden, jnp.where(largest == 0, 1, largest / _LARGEST)

    return measure


def _attention_of(layer: nnx.Module) -> Attention | LatentAttention:
    return next(node for _, node in nnx.iter_graph(layer) if isinstance(node, Attention | LatentAttention))
