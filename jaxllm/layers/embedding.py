"""Token embedding, and the logits that may share its matrix."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.layers.linear import project, project_quantized, rotated
from jaxllm.layers.parameter import parameter, quantized
from jaxllm.quantization import Scheme
from sharding.collectives import num_shards, shard_index, sum_over


class Embedding(nnx.Module):
    """A [V, M] matrix: rows are looked up on the way in and scored against on the way out. Devices share the rows."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: jnp.dtype) -> None:
        self.vocab_size = vocab_size
        self.weight = parameter((vocab_size, hidden_size), ("vocab", "embed"), dtype)
        self.dtype = dtype
        self.scheme: Scheme | None = None

    def quantize(self, scheme: Scheme) -> None:
        """Declares the matrix as numbers and a scale a row."""
        self.scheme = scheme.of_table().within(self.weight.get_value().shape[1])
        self.weight, scales = quantized(self.weight, self.scheme)
        self.weight_scale = nnx.data(scales)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Maps token_ids: [T] to [T, M]."""
        weight = self.weight[...]
        if num_shards("vocab") == 1:
            return self._rows(token_ids)
        rows = token_ids - shard_index("vocab") * weight.shape[0]
        is_mine = (rows >= 0) & (rows < weight.shape[0])
        return sum_over(jnp.where(is_mine[:, None], self._rows(jnp.where(is_mine, rows, 0)), 0), "vocab")

    def _rows(self, indices: jax.Array) -> jax.Array:
        """Returns this device's rows at indices: [T] as floats [T, M]."""
        rows = self.weight[...][indices]
        if self.scheme is None:
            return rows
        scaled = rows.astype(jnp.float32) * self.weight_scale[...][0, indices][:, None]
        return rotated(scaled, self.scheme).astype(self.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Maps hidden: [R, M] to float32 logits [R, V] of this device's tokens, -inf where the vocabulary is padded."""
        weight = self.weight[...]
        if self.scheme is None:
            logits = project(hidden, weight).astype(jnp.float32)
        else:
            logits = project_quantized(hidden, weight, self.weight_scale[...], self.scheme).astype(jnp.float32)
        if num_shards("vocab") * weight.shape[0] == self.vocab_size:
            return logits
        token_ids = shard_index("vocab") * weight.shape[0] + jnp.arange(weight.shape[0])
        return jnp.where(token_ids < self.vocab_size, logits, -jnp.inf)


class LearnedPositions(nnx.Module):
    """A learnt vector for each position, [max_len + offset, M]; the first `offset` rows are never used."""

    def __init__(self, max_len: int, hidden_size: int, dtype: jnp.dtype, offset: int = 0) -> None:
        self.weight = parameter((max_len + offset, hidden_size), (None, "embed"), dtype)
        self.offset = offset

    def __call__(self, positions: jax.Array) -> jax.Array:
        """Maps positions: [T] to [T, M]."""
        return self.weight[...][positions + self.offset]
