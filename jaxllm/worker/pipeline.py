"""Pipeline: the stages that hold the model, in order, and what goes from one to the next.

With one stage, a forward pass is its programs, one after the other. With several, each pass goes from stage to stage;
nothing waits for it, so that while one stage computes a pass the stage before computes the next one.

Where stages belong to several processes, each process runs the programs of its own stages, and all take part in the
exchanges between stages that concern them, in the same order.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.layers.attention import LayerCache
from jaxllm.layers.forward_batch import ForwardBatch, LogitEdits, SamplingBatch
from jaxllm.layers.sampler import ScoredTokens
from jaxllm.worker.cache_engine import CacheEngine
from jaxllm.worker.programs import EDITS_PER_ROW, CompiledPrograms
from jaxllm.worker.stage_exchange import StageExchange
from jaxllm.worker.step_fn import StepModel
from sharding.partition import put, replicated


class Stage(NamedTuple):
    """Consecutive layers on devices of their own, some of which are this process's."""

    mesh: Mesh
    model: StepModel
    cache_engine: CacheEngine
    programs: CompiledPrograms


class Pipeline:
    """Runs the programs of one step on every stage of this process.

    Args:
      stages: In order; None for one that is wholly another process's.
      exchange: What goes between them.
    """

    def __init__(self, stages: Sequence[Stage | None], exchange: StageExchange) -> None:
        self._stages, self._exchange = tuple(stages), exchange

    def move_blocks(
        self,
        swap_out: Sequence[tuple[int, int]],
        swap_in: Sequence[tuple[int, int]],
        copy: Sequence[tuple[int, int]],
    ) -> None:
        """Moves KV cache blocks of every layer, in this order; each is a list of (from, to)."""
        for stage in self._stages:
            if stage is not None:
                stage.cache_engine.swap_out(swap_out, stage.programs)
                stage.cache_engine.swap_in(swap_in, stage.programs)
                stage.cache_engine.copy(copy, stage.programs)

    def forward(self, size: int, inputs: ForwardBatch) -> jax.Array | None:
        """Returns the last layer's output [T, M] of one pass, on the last stage. Doesn't wait for it."""
        hidden: jax.Array | None = None
        for index, stage in enumerate(self._stages):
            if index > 0:
                hidden = self._exchange.hand_on(index - 1, size, hidden)
            hidden = None if stage is None else _run_stage(stage, size, hidden, inputs)
        return hidden

    def draw(
        self, size: int, hidden: jax.Array | None, sampling: SamplingBatch, edits: LogitEdits | None, has_scores: bool
    ) -> tuple[np.ndarray, ScoredTokens | None]:
        """Draws a token for each row of `sampling` after a pass of `size` tokens: [R] int32, and scores or None."""
        stage, num_rows = self._stages[-1], len(sampling.seeds)
        token_ids, scores = None, None
        if stage is not None:
            batch = put(sampling, replicated(stage.mesh))
            logits = _logits(stage, size, hidden, batch.logits_indices)
            token_ids = stage.programs("sample", num_rows, _edited(stage, logits, edits), batch)
            if has_scores:
                scores = stage.programs("score", num_rows, logits, token_ids)
        tokens = self._exchange.tokens(num_rows, token_ids)
        return tokens, self._exchange.scores(num_rows, scores) if has_scores else None

    def score(self, size: int, hidden: jax.Array | None, indices: np.ndarray, token_ids: np.ndarray) -> ScoredTokens:
        """Scores token_ids: [R] as what follows the tokens indices: [R] of a pass of `size` tokens."""
        stage, scores = self._stages[-1], None
        if stage is not None:
            on_devices = put((indices, token_ids), replicated(stage.mesh))
            logits = _logits(stage, size, hidden, on_devices[0])
            scores = stage.programs("score", len(token_ids), logits, on_devices[1])
        return self._exchange.scores(len(token_ids), scores)


def _run_stage(stage: Stage, size: int, hidden: jax.Array | None, inputs: ForwardBatch) -> jax.Array:
    batch = put(inputs, replicated(stage.mesh))
    if hidden is None:
        hidden = stage.programs("embed", size, stage.model.embed_weights, batch.token_ids, batch.positions)
    return _run_layers(stage, size, hidden, batch)


def _run_layers(stage: Stage, size: int, hidden: jax.Array, batch: ForwardBatch) -> jax.Array:
    caches = stage.cache_engine.caches
    updated: list[LayerCache] = []
    for segment in stage.model.segments:
        mine = caches[len(updated) : len(updated) + segment.num_layers]
        hidden, mine = stage.programs(f"layers_{segment.kind}", size, segment.weights, hidden, batch, mine)
        updated.extend(mine)
    stage.cache_engine.caches = tuple(updated)
    return hidden


def _logits(stage: Stage, size: int, hidden: jax.Array | None, indices: jax.Array) -> jax.Array:
    return stage.programs("logits", size, stage.model.logits_weights, hidden, indices)


def _edited(stage: Stage, logits: jax.Array, edits: LogitEdits | None) -> jax.Array:
    """Returns logits to draw from; the given ones stay as they are."""
    if edits is None:
        return logits
    edited, is_restricted = logits, edits.is_restricted
    for first in range(0, len(edits.rows), len(logits) * EDITS_PER_ROW):
        some = put(_batch_of(edits, first, is_restricted), replicated(stage.mesh))
        edited = stage.programs("edit_logits", len(logits), logits, edited, some)
        is_restricted = np.zeros_like(is_restricted)  # once is enough, and later edits must not ban earlier ones'
    return edited


def _batch_of(edits: LogitEdits, first: int, is_restricted: np.ndarray) -> LogitEdits:
    """Returns as many edits as one call takes, from number `first` on, padded where there are fewer."""
    size = len(is_restricted) * EDITS_PER_ROW

    def pad(values: np.ndarray, fill: int) -> np.ndarray:
        padded = np.full(size, fill, values.dtype)
        mine = values[first : first + size]
        padded[: len(mine)] = mine
        return padded

    return LogitEdits(
        rows=pad(edits.rows, len(is_restricted)),  # past the last one: nothing is written there
        token_ids=pad(edits.token_ids, 0),
        biases=pad(edits.biases, 0),
        divisors=pad(edits.divisors, 1),
        penalties=pad(edits.penalties, 0),
        is_restricted=is_restricted,
    )
