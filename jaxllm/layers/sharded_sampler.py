"""The sampler where devices share the vocabulary: each has the logits of its own tokens, [R, V / n] of [R, V].

Greedy draws exchange one value and one token a row and device. Everything else exchanges pieces so that each device
has some rows whole, and handles those as one device would: n times fewer bytes and n times less work than if each
gathered all rows, and the very same tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.layers import sampler
from jaxllm.layers.forward_batch import LogitEdits, SamplingBatch
from sharding.collectives import gather, num_shards, rows_for_columns, shard_index


@dataclass(frozen=True)
class ShardedSampler:
    """jaxllm.layers.sampler on sharded logits; call it inside jax.shard_map.

    Attributes:
      vocab_size: V. The devices' tokens may be more: the last ones are padding, with logits of -inf.
    """

    vocab_size: int

    def sample(self, logits: jax.Array, batch: SamplingBatch) -> jax.Array:
        """Draws one token a row of logits: [R, V / n]; returns [R] int32, on every device."""
        greedy = _argmax(logits)
        is_random = batch.temperature > 0
        return jax.lax.cond(
            jnp.any(is_random),
            lambda: jnp.where(is_random, self._on_whole_rows(sampler.sample, logits, batch), greedy),
            lambda: greedy,
        )

    def score(self, logits: jax.Array, token_ids: jax.Array, num_top: int) -> sampler.ScoredTokens:
        """Scores token_ids: [R] under logits: [R, V / n], with the most likely tokens beside them, on every device."""

        def score(logits: jax.Array, token_ids: jax.Array) -> sampler.ScoredTokens:
            return sampler.score(logits, token_ids, num_top)

        scored: sampler.ScoredTokens = self._on_whole_rows(score, logits, token_ids)
        return scored

    def edit_logits(self, logits: jax.Array, edited: jax.Array, edits: LogitEdits) -> jax.Array:
        """Edits single logits of logits: [R, V / n], those that are here."""
        size = logits.shape[1]
        columns = edits.token_ids - shard_index("vocab") * size
        is_mine = (columns >= 0) & (columns < size)
        return sampler.edit_logits(logits, edited, edits._replace(token_ids=jnp.where(is_mine, columns, size)))

    def _on_whole_rows(self, function: Callable[..., Any], logits: jax.Array, arguments: Any) -> Any:
        """Returns function(logits [R, V], arguments) of logits: [R, V / n]; each device computes some of the rows.

        Each argument and result has a row for each row of logits.
        """
        num_rows, num_devices = logits.shape[0], num_shards("vocab")
        rows_each = -(-num_rows // num_devices)

        def pad(x: jax.Array) -> jax.Array:
            return jnp.pad(x, ((0, rows_each * num_devices - num_rows), *((0, 0),) * (x.ndim - 1)))

        def mine(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(pad(x), shard_index("vocab") * rows_each, rows_each)

        whole = rows_for_columns(pad(logits), "vocab")[:, : self.vocab_size]  # [rows_each, V]
        results = function(whole, jax.tree.map(mine, arguments))
        return jax.tree.map(lambda x: gather(x, "vocab")[:num_rows], results)


def _argmax(logits: jax.Array) -> jax.Array:
    """Returns [R] int32, the first token of each row's maximum over all devices."""
    local = sampler.argmax(logits)
    largest = jnp.take_along_axis(logits, local[:, None], axis=-1)  # [R, 1]
    largest_of_each = gather(largest.T, "vocab")  # [n, R]
    tokens_of_each = gather((local + shard_index("vocab") * logits.shape[1])[None], "vocab")  # [n, R]
    device = jnp.argmax(largest_of_each, axis=0)[None]  # the first of equal ones: its tokens come first too
    return jnp.take_along_axis(tokens_of_each, device, axis=0)[0]
