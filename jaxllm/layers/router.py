"""Choosing each token's experts. Always in float32: a rounding can change the choice."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.layers.linear import Linear
from jaxllm.layers.parameter import parameter

_FLOAT32 = jnp.dtype(jnp.float32)


class SoftmaxRouter(nnx.Module):
    """The k experts with the highest probabilities.

    Args:
      hidden_size: M.
      num_experts: E.
      num_chosen: k. Static, as is what follows.
      is_normalised: Whether the k weights are made to sum to 1.
      has_bias: Whether the scores have a bias.
      scale: Multiplies the weights.
      num_groups: Groups that the experts stand in; only experts of the best ones may be chosen.
      num_chosen_groups: Those best ones, by the highest probability in them.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_chosen: int,
        *,
        is_normalised: bool,
        has_bias: bool = False,
        scale: float = 1.0,
        num_groups: int = 1,
        num_chosen_groups: int = 1,
    ) -> None:
        self.scores = Linear(hidden_size, num_experts, axes=("router", "embed"), has_bias=has_bias, dtype=_FLOAT32)
        self.num_chosen, self.is_normalised, self.scale = num_chosen, is_normalised, scale
        self.num_groups, self.num_chosen_groups = num_groups, num_chosen_groups

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps x: [T, M] to the weights [T, k] float32 and ids [T, k] int32 of each token's experts."""
        probs = jax.nn.softmax(self.scores(x.astype(jnp.float32)), axis=-1)  # [T, E]
        if self.num_groups > 1:
            best = jnp.max(_in_groups(probs, self.num_groups), axis=-1)  # [T, num_groups]
            probs = jnp.where(_allowed(best, self.num_chosen_groups, probs.shape[-1]), probs, 0.0)
        weights, ids = jax.lax.top_k(probs, self.num_chosen)
        if self.is_normalised:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights * self.scale, ids


class SigmoidRouter(nnx.Module):
    """DeepSeek V3's: experts are chosen by score + correction, and weighed by score alone.

    A group counts as much as its two best experts together. Arguments as SoftmaxRouter's.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_chosen: int,
        *,
        is_normalised: bool,
        scale: float,
        num_groups: int,
        num_chosen_groups: int,
    ) -> None:
        self.scores = Linear(hidden_size, num_experts, axes=("router", "embed"), has_bias=False, dtype=_FLOAT32)
        self.correction = parameter((num_experts,), ("router",), _FLOAT32)
        self.num_chosen, self.is_normalised, self.scale = num_chosen, is_normalised, scale
        self.num_groups, self.num_chosen_groups = num_groups, num_chosen_groups

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps x: [T, M] to the weights [T, k] float32 and ids [T, k] int32 of each token's experts."""
        scores = jax.nn.sigmoid(self.scores(x.astype(jnp.float32)))  # [T, E]
        wanted = scores + self.correction[...]
        best, _ = jax.lax.top_k(_in_groups(wanted, self.num_groups), 2)  # [T, num_groups, 2]
        allowed = _allowed(jnp.sum(best, axis=-1), self.num_chosen_groups, scores.shape[-1])
        _, ids = jax.lax.top_k(jnp.where(allowed, wanted, -jnp.inf), self.num_chosen)
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        if self.is_normalised:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return weights * self.scale, ids


def _in_groups(scores: jax.Array, num_groups: int) -> jax.Array:
    """Reshapes [T, E] to [T, num_groups, E / num_groups]."""
    return scores.reshape(scores.shape[0], num_groups, -1)


def _allowed(group_scores: jax.Array, num_chosen: int, num_experts: int) -> jax.Array:
    """Returns [T, E] bool: which experts are of the num_chosen best groups by group_scores: [T, num_groups]."""
    num_groups = group_scores.shape[-1]
    _, chosen = jax.lax.top_k(group_scores, num_chosen)  # [T, num_chosen]
    is_chosen = jnp.any(chosen[:, :, None] == jnp.arange(num_groups), axis=1)  # [T, num_groups]
    return jnp.repeat(is_chosen, num_experts // num_groups, axis=-1)
