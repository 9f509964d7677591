"""Token embedding, and the logits that may share its matrix."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.layers.linear import project, project_quantized, rotated
from jaxllm.layers.parameter import parameter, quantized
from jaxllm.quantization import Scheme


class Embedding(nnx.Module):
    """A [V, M] matrix: rows are looked up on the way in and scored against on the way out."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: jnp.dtype) -> None:
        self.weight = parameter((vocab_size, hidden_size), ("vocab", "embed"), dtype)
        self.dtype = dtype
        self.scheme: Scheme | None = None

    def quantize(self, scheme: Scheme) -> None:
        """Declares the matrix as numbers and a scale a row."""
        self.scheme = scheme.of_table()
        self.weight, scales = quantized(self.weight, self.scheme)
        self.weight_scale = nnx.data(scales)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Maps token_ids: [T] to [T, M]."""
        rows = self.weight[...][token_ids]
        if self.scheme is None:
            return rows
        scaled = rows.astype(jnp.float32) * self.weight_scale[...][0, token_ids][:, None]
        return rotated(scaled, self.scheme).astype(self.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Maps hidden: [R, M] to float32 logits [R, V]."""
        if self.scheme is None:
            logits = project(hidden, self.weight[...])
        else:
            logits = project_quantized(hidden, self.weight[...], self.weight_scale[...], self.scheme)
        return logits.astype(jnp.float32)


class LearnedPositions(nnx.Module):
    """A learnt vector for each position, [max_len + offset, M]; the first `offset` rows are never used."""

    def __init__(self, max_len: int, hidden_size: int, dtype: jnp.dtype, offset: int = 0) -> None:
        self.weight = parameter((max_len + offset, hidden_size), (None, "embed"), dtype)
        self.offset = offset

    def __call__(self, positions: jax.Array) -> jax.Array:
        """Maps positions: [T] to [T, M]."""
        return self.weight[...][positions + self.offset]
