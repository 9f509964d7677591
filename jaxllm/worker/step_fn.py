"""The device functions of one step, as pure functions of arrays, and the weights that they take.

A step is a chain of programs:  embed -> layers, segment after segment -> logits -> sample (-> score).

The nnx model is split here once; afterwards weights are tuples of raw arrays, merged only inside a trace.
Layers that are alike share one program, compiled once and called with each segment's weights in turn. On CPU
a segment is one layer: the calls cost under a millisecond a step and compiling is some five times faster. On
accelerators one segment holds every layer.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxllm.layers import sampler
from jaxllm.layers.attention import LayerCache
from jaxllm.layers.forward_batch import ForwardBatch, LogitEdits, SamplingBatch
from jaxllm.layers.sharded_sampler import ShardedSampler
from jaxllm.models.causal_lm import CausalLM, Frame, ModelPart
from jaxllm.sampling_params import MAX_BEAM_WIDTH, MAX_LOGPROBS
from pallas_kernels.kv_cache_update import copy_blocks
from sharding.rules import num_shards

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
      embed_weights: Weights of the embedding; none where an earlier stage has it.
      logits_weights: Weights of the last norm and the logits; none where a later stage has them.
      segments: The layers in order.
      embed: (embed_weights, token_ids [T], positions [T]) -> hidden [T, M].
      run_layers: For each kind, (weights, hidden [T, M], batch, caches) -> (hidden [T, M], caches).
      logits: (logits_weights, hidden [T, M], indices [R]) -> float32 logits [R, V].
    """

    embed_weights: Weights
    logits_weights: Weights
    segments: tuple[Segment, ...]
    embed: Callable[[Weights, jax.Array, jax.Array], jax.Array]
    run_layers: tuple[LayerRunner, ...]
    logits: Callable[[Weights, jax.Array, jax.Array], jax.Array]


def split_model(model: CausalLM, layers_per_segment: int, part: ModelPart | None = None) -> StepModel:
    """Splits a model into weights and functions.

    Args:
      model: With arrays, or jax.ShapeDtypeStruct with shardings, as the weights that it holds.
      layers_per_segment: Layers that run as one program.
      part: What the model is of its whole, as it was loaded; None where it is the whole.
    """
    frame = _SplitFrame(model.frame)
    has_hidden, has_logits = (part is None or part.has_hidden), (part is None or part.has_logits)
    embed_weights = frame.weights_of(model.frame.parts_of_hidden) if has_hidden else {}
    logits_weights = frame.weights_of(model.frame.parts_of_logits) if has_logits else {}
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
        return frame.merge(zip(embed_weights, weights, strict=True)).hidden(token_ids, positions)

    def logits(weights: Weights, hidden: jax.Array, indices: jax.Array) -> jax.Array:
        return frame.merge(zip(logits_weights, weights, strict=True)).logits(hidden[indices])

    return StepModel(
        tuple(embed_weights.values()),
        tuple(logits_weights.values()),
        tuple(segments),
        embed,
        tuple(run_layers),
        logits,
    )


class _SplitFrame:
    """A frame in pieces, so that it can be put together again with some of its weights alone."""

    def __init__(self, frame: Frame) -> None:
        self._graph_def, state = nnx.split(frame)
        paths, self._tree = jax.tree_util.tree_flatten_with_path(state)
        self._attributes = [str(path[0].key) for path, _ in paths]
        self._weights = [weight for _, weight in paths]
        self._absent = [jax.ShapeDtypeStruct(weight.shape, weight.dtype) for weight in self._weights]

    def weights_of(self, attributes: Sequence[str]) -> dict[int, jax.Array]:
        """Returns the weights under these attributes of the frame, by their places."""
        return {place: self._weights[place] for place, name in enumerate(self._attributes) if name in attributes}

    def merge(self, weights: Iterable[tuple[int, jax.Array]]) -> Any:
        """Returns the frame with these weights at these places; it can't use any others."""
        leaves: list[Any] = list(self._absent)
        for place, weight in weights:
            leaves[place] = weight
        return _merge(self._graph_def, self._tree, leaves)


class StepSampler(NamedTuple):
    """What is done with logits: [R, V].

    Attributes:
      sample: (logits, batch) -> [R] int32, one token a row.
      score: (logits, token_ids [R]) -> ScoredTokens, with the NUM_TOP most likely tokens.
      edit_logits: (logits, edited, edits) -> [R, V], what to draw from.
    """

    sample: Callable[[jax.Array, SamplingBatch], jax.Array]
    score: Callable[[jax.Array, jax.Array], sampler.ScoredTokens]
    edit_logits: Callable[[jax.Array, jax.Array, LogitEdits], jax.Array]


def sampler_for(vocab_size: int, mesh: Mesh) -> StepSampler:
    """Returns the sampler for logits of vocab_size tokens, which devices of the mesh may share."""
    parts: Any = sampler if num_shards(mesh, "vocab") == 1 else ShardedSampler(vocab_size)

    def sample(logits: jax.Array, batch: SamplingBatch) -> jax.Array:
        with jax.named_scope("sample"):
            return parts.sample(logits, batch)

    def score(logits: jax.Array, token_ids: jax.Array) -> sampler.ScoredTokens:
        with jax.named_scope("score"):
            return parts.score(logits, token_ids, min(NUM_TOP, vocab_size))

    def edit_logits(logits: jax.Array, edited: jax.Array, edits: LogitEdits) -> jax.Array:
        with jax.named_scope("edit_logits"):
            return parts.edit_logits(logits, edited, edits)

    return StepSampler(sample, score, edit_logits)


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
