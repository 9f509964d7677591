"""Token embedding, and the logits that may share its matrix."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.layers.linear import project
from jaxllm.layers.parameter import parameter


class Embedding(nnx.Module):
    """A [V, M] matrix: rows are looked up on the way in and scored against on the way out."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: jnp.dtype) -> None:
        self.weight = parameter((vocab_size, hidden_size), ("vocab", "embed"), dtype)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Maps token_ids: [T] to [T, M]."""
        return self.weight[...][token_ids]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Maps hidden: [R, M] to float32 logits [R, V]."""
        return project(hidden, self.weight[...]).astype(jnp.float32)


class LearnedPositions(nnx.Module):
    """A learnt vector for each position, [max_len + offset, M]; the first `offset` rows are never used."""

    def __init__(self, max_len: int, hidden_size: int, dtype: jnp.dtype, offset: int = 0) -> None:
        self.weight = parameter((max_len + offset, hidden_size), (None, "embed"), dtype)
        self.offset = offset

    def __call__(self, positions: jax.Array) -> jax.Array:
        """Maps positions: [T] to [T, M]."""
        return self.weight[...][positions + self.offset]
