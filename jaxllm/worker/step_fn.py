"""The device functions of one step, as pure functions of arrays, and the weights that they take.

A step is a chain of programs:  embed -> layers, segment after segment -> logits -> sample (-> score).

The nnx model is split here once; afterwards weights are tuples of raw arrays, merged only inside a trace.
Layers that are alike share one program, compiled once and called with each segment's weights in turn. On CPU
a segment is one layer: the calls cost under a millisecond a step and compiling is some five times faster. On
accelerators one segment holds every layer.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxllm.layers import sampler
from jaxllm.layers.attention import LayerCache
from jaxllm.layers.forward_batch import ForwardBatch, SamplingBatch
from jaxllm.models.causal_lm import CausalLM
from jaxllm.sampling_params import MAX_BEAM_WIDTH, MAX_LOGPROBS
from pallas_kernels.kv_cache_update import copy_blocks

NUM_TOP = max(MAX_LOGPROBS, 2 * MAX_BEAM_WIDTH)  # most likely tokens that `score` returns
Weights = tuple[jax.Array, ...]
Caches = tuple[LayerCache, ...]
LayerRunner = Callable[[Weights, jax.Array, ForwardBatch, Caches], tuple[jax.Array, Caches]]


class Segment(NamedTuple):
    """Consecutive layers that run as one program."""

    kind: int  # index into StepModel.run_layers; segments of one kind differ in weights only
    weights: Weights
    num_layers: int


class StepModel(NamedTuple):
    """The model as a step sees it: functions to compile, and weights to call them with.

    Attributes:
      frame: Weights of the embedding, last norm and logits.
      segments: The layers in order.
      embed: (frame, token_ids [T], positions [T]) -> hidden [T, M].
      run_layers: For each kind, (weights, hidden [T, M], batch, caches) -> (hidden [T, M], caches).
      logits: (frame, hidden [T, M], indices [R]) -> float32 logits [R, V].
    """

    frame: Weights
    segments: tuple[Segment, ...]
    embed: Callable[[Weights, jax.Array, jax.Array], jax.Array]
    run_layers: tuple[LayerRunner, ...]
    logits: Callable[[Weights, jax.Array, jax.Array], jax.Array]


def split_model(model: CausalLM, layers_per_segment: int) -> StepModel:
    """Splits a model into weights and functions.

    Args:
      model: With real arrays as weights.
      layers_per_segment: Layers that run as one program.
    """
    frame_def, frame_state = nnx.split(model.frame)
    frame, frame_tree = jax.tree.flatten(frame_state)
    kinds: dict[Any, int] = {}
    segments: list[Segment] = []
    run_layers: list[LayerRunner] = []
    layers = list(model.layers)
    for first in range(0, len(layers), layers_per_segment):
        group = layers[first : first + layers_per_segment]
        graph_def, state = nnx.split(nnx.List(group))
        weights, tree = jax.tree.flatten(state)
        if graph_def not in kinds:
            kinds[graph_def] = len(run_layers)
            run_layers.append(_layer_runner(graph_def, tree))
        segments.append(Segment(kinds[graph_def], tuple(weights), len(group)))

    def embed(weights: Weights, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        return _merge(frame_def, frame_tree, weights).hidden(token_ids, positions)

    def logits(weights: Weights, hidden: jax.Array, indices: jax.Array) -> jax.Array:
        return _merge(frame_def, frame_tree, weights).logits(hidden[indices])

    return StepModel(tuple(frame), tuple(segments), embed, tuple(run_layers), logits)


def sample(logits: jax.Array, batch: SamplingBatch) -> jax.Array:
    """Draws one token a row of logits: [R, V]; returns [R] int32."""
    with jax.named_scope("sample"):
        return sampler.sample(logits, batch)


def score(logits: jax.Array, token_ids: jax.Array) -> sampler.ScoredTokens:
    """Scores token_ids: [R] under logits: [R, V], with the NUM_TOP most likely tokens beside them."""
    with jax.named_scope("score"):
        return sampler.score(logits, token_ids, min(NUM_TOP, logits.shape[-1]))


def add_bias(logits: jax.Array, rows: jax.Array, token_ids: jax.Array, values: jax.Array) -> jax.Array:
    """Adds values: [C] to the logits: [R, V] of rows: [C] and token_ids: [C]."""
    with jax.named_scope("add_bias"):
        return sampler.add_bias(logits, rows, token_ids, values)


def copy_cache_blocks(cache: LayerCache, sources: jax.Array, destinations: jax.Array) -> LayerCache:
    """Copies whole blocks of one layer's keys and values; see pallas_kernels.kv_cache_update.copy_blocks."""
    return tuple(copy_blocks(array, sources, destinations) for array in cache)


def gather_cache_blocks(cache: LayerCache, sources: jax.Array) -> LayerCache:
    """Returns the keys and values of blocks sources: [C], each array [C, ...]."""
    return tuple(array[sources] for array in cache)


def scatter_cache_blocks(cache: LayerCache, destinations: jax.Array, rows: LayerCache) -> LayerCache:
    """Writes rows: [C, ...] of each array into blocks destinations: [C]. Pad with block 0, the null block."""
    return tuple(
        array.at[destinations].set(mine, mode="promise_in_bounds") for array, mine in zip(cache, rows, strict=True)
    )


def _layer_runner(graph_def: Any, tree: Any) -> LayerRunner:
    def run_layers(
        weights: Weights, hidden: jax.Array, batch: ForwardBatch, caches: Caches
    ) -> tuple[jax.Array, Caches]:
        updated = []
        for index, (layer, cache) in enumerate(zip(_merge(graph_def, tree, weights), caches, strict=True)):
            with jax.named_scope(f"layer_{index}"):
                hidden, cache = layer(hidden, batch, cache)
            updated.append(cache)
        return hidden, tuple(updated)

    return run_layers


def _merge(graph_def: Any, tree: Any, weights: Sequence[jax.Array]) -> Any:
    return nnx.merge(graph_def, jax.tree.unflatten(tree, weights))
