"""Runs whole texts through a model at once, outside of any schedule: to calibrate and to measure, not for requests."""

import jax
import numpy as np

from jaxllm.intmath import cdiv
from jaxllm.layers.forward_batch import ForwardBatch
from jaxllm.worker.step_fn import StepModel
from pallas_kernels.paged_attention import KVLayout


class WholeTexts:
    """Compiled for one model and one shape of texts after the other.

    Args:
      model: Split with one layer a segment.
      layout: Of the KV cache.
    """

    def __init__(self, model: StepModel, layout: KVLayout) -> None:
        self._model, self._layout = model, layout
        self._embed = jax.jit(model.embed)
        self._run_layers = [jax.jit(function, donate_argnums=(1, 3)) for function in model.run_layers]
        self._logits = jax.jit(model.logits)

    def run(self, token_ids: np.ndarray) -> jax.Array:
        """Runs token_ids: [S, C], a text a row. Returns the last layer's output [S * C, M], text after text."""
        batch = batch_of(token_ids, self._layout.block_size)
        num_blocks = 1 + batch.block_tables.size
        hidden = self._embed(self._model.embed_weights, batch.token_ids, batch.positions)
        for segment in self._model.segments:
            empty = (self._layout.zeros(num_blocks),)
            hidden, _ = self._run_layers[segment.kind](segment.weights, hidden, batch, empty)
        return hidden

    def logits(self, hidden: jax.Array, indices: np.ndarray) -> jax.Array:
        """Returns float32 logits [R, V] of the tokens at indices: [R] of hidden: [T, M]."""
        return self._logits(self._model.logits_weights, hidden, indices)


def batch_of(token_ids: np.ndarray, block_size: int) -> ForwardBatch:
    """Returns the forward pass of token_ids: [S, C], a text a row, each with the blocks that it needs."""
    num_texts, length = token_ids.shape
    blocks_per_text = cdiv(length, block_size)
    tables = 1 + np.arange(num_texts * blocks_per_text, dtype=np.int32).reshape(num_texts, blocks_per_text)
    positions = np.arange(length, dtype=np.int32)
    slots = tables[:, positions // block_size] * block_size + positions % block_size  # [S, C]
    return ForwardBatch(
        token_ids=token_ids.astype(np.int32).ravel(),
        positions=np.tile(positions, num_texts),
        slots=slots.astype(np.int32).ravel(),
        block_tables=tables,
        seq_lens=np.full(num_texts, length, np.int32),
        query_start_loc=np.arange(0, (num_texts + 1) * length, length, dtype=np.int32),
    )
