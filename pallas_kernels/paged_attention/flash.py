"""The step that every flash attention kernel repeats: scores in, weights out, running maximum and sum kept.

Values only, no refs and no data movement, so that it lowers to Mosaic and to Triton alike. Everything is float32.
Scores are powers of two, not of e: log2(e) is part of their scale, since exp2 is the cheaper instruction.

The running columns `maximum` and `total` are [R, 1], or [R, 128] where that is what the hardware likes: then all lanes
of `maximum` are alike, and those of `total` add up to the sum. `widen` spreads a maximum over more lanes.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)
# A score that a row may not see is far below where the running maximum starts: its weight is 0, never NaN, even in
# a row that hasn't seen anything yet.
HIDDEN = -2e38
LOWEST = -1e30


class FlashStep(NamedTuple):
    """What one step leaves.

    Attributes:
      weights: [R, C] of this step's values.
      shrink: Like maximum; what the weighted sum so far is multiplied with before this step's is added.
      maximum: Running maximum of the scores.
      total: Running sum of the weights.
    """

    weights: jax.Array
    shrink: jax.Array
    maximum: jax.Array
    total: jax.Array


def scale_scores(products: jax.Array, scale: float, logit_soft_cap: float | None) -> jax.Array:
    """Turns products of queries and keys into scores to the base 2, capped if there is a cap."""
    if logit_soft_cap is None:
        return products * (scale * LOG2_E)
    return jnp.tanh(products * (scale / logit_soft_cap)) * (logit_soft_cap * LOG2_E)


def query_scale(scale: float, logit_soft_cap: float | None) -> float:
    """What queries can be multiplied with beforehand, so that their products only need cap_scores."""
    return scale * LOG2_E if logit_soft_cap is None else scale / logit_soft_cap


def cap_scores(products: jax.Array, logit_soft_cap: float | None) -> jax.Array:
    """Turns products of scaled queries and keys into scores to the base 2."""
    return products if logit_soft_cap is None else jnp.tanh(products) * (logit_soft_cap * LOG2_E)


def is_visible(keys: jax.Array, queries: jax.Array, sliding_window: int | None) -> jax.Array:
    """Whether the query at one position sees the key at another: int32 arrays that broadcast against each other."""
    visible = keys <= queries
    if sliding_window is not None:
        visible &= keys > queries - sliding_window
    return visible


def flash_step(scores: jax.Array, maximum: jax.Array, total: jax.Array) -> FlashStep:
    """Adds scores: [R, C], HIDDEN where they aren't visible."""
    highest = jnp.maximum(maximum, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp2(scores - widen(highest, scores.shape[1]))
    shrink = jnp.exp2(maximum - highest)
    return FlashStep(weights, shrink, highest, total * shrink + _sum_to(weights, total.shape[1]))


def widen(column: jax.Array, width: int) -> jax.Array:
    """Spreads [R, 1], or [R, 128] of equal lanes, over `width` lanes. A [R, 1] is left to broadcast by itself."""
    lanes = column.shape[1]
    if lanes in (1, width):
        return column
    return jnp.concatenate([column] * (width // lanes), axis=1)


def _sum_to(weights: jax.Array, lanes: int) -> jax.Array:
    """Adds up weights: [R, C] to [R, lanes]."""
    if lanes == 1:
        return jnp.sum(weights, axis=1, keepdims=True)
    total = weights[:, :lanes]
    for first in range(lanes, weights.shape[1], lanes):
        total += weights[:, first : first + lanes]
    return total
