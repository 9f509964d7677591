"""Choosing tokens from logits, and scoring tokens under them. Each row depends on nothing but itself."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.layers.forward_batch import LogitEdits, SamplingBatch

_BLOCK = 256  # tokens of the vocabulary that are first looked at together
_ONE = 0x3F800000  # bits of float32 1.0


class ScoredTokens(NamedTuple):
    """Log probabilities under the raw logits of one position a row."""

    logprobs: jax.Array  # [R] float32, of the given tokens
    ranks: jax.Array  # [R] int32, 1 is the most likely
    top_token_ids: jax.Array  # [R, num_top] int32, most likely first
    top_logprobs: jax.Array  # [R, num_top] float32


def sample(logits: jax.Array, batch: SamplingBatch) -> jax.Array:
    """Draws one token a row: greedy, or temperature, min-p, top-k, top-p and a seeded draw, in this order.

    Args:
      logits: [R, V] float32.
      batch: How each row is drawn.

    Returns:
      [R] int32 token ids.
    """
    greedy = argmax(logits)
    is_random = batch.temperature > 0
    return jax.lax.cond(
        jnp.any(is_random),
        lambda: jnp.where(is_random, _draw(_kept_probs(logits, batch), batch), greedy),
        lambda: greedy,
    )


def edit_logits(logits: jax.Array, edited: jax.Array, edits: LogitEdits) -> jax.Array:
    """Edits single logits; others stay, or in restricted rows are banned.

    Args:
      logits: [R, V] float32. They are kept: log probabilities are those of the raw ones.
      edited: [R, V] float32: `logits`, or what an earlier call with other edits has made of them.
      edits: What is changed. Places outside of the logits are padding.

    Returns:
      [R, V] float32.
    """
    places = edits.rows, edits.token_ids
    values = logits.at[places].get(mode="clip") + edits.biases
    values = jnp.where(values > 0, values / edits.divisors, values * edits.divisors) - edits.penalties
    edited = jnp.where(edits.is_restricted[:, None], -jnp.inf, edited)
    return edited.at[places].set(values, mode="drop")


def score(logits: jax.Array, token_ids: jax.Array, num_top: int) -> ScoredTokens:
    """Scores given tokens, and finds the most likely ones.

    Args:
      logits: [R, V] float32.
      token_ids: [R] int32.
      num_top: Most likely tokens to return. Static.
    """
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)  # [R, 1]
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)  # [R, 1]
    top_logits, top_token_ids = _top_k(logits, num_top)
    return ScoredTokens(
        (chosen - total)[:, 0],
        1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32),
        top_token_ids,
        top_logits - total,
    )


def argmax(logits: jax.Array) -> jax.Array:
    """Returns [R] int32, the first index of each row's maximum: block maxima first, then within one block.

    XLA:CPU takes 10 times longer for an argmax over the whole vocabulary.
    """
    blocks = _in_blocks(logits, -jnp.inf)  # [R, n, _BLOCK]
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)  # [R]
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # [R, _BLOCK]
    return (block * _BLOCK + jnp.argmax(within, axis=-1)).astype(jnp.int32)


def _top_k(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns each row's k largest values [R, k] and their indices [R, k] int32, from its k best blocks."""
    blocks = _in_blocks(logits, -jnp.inf)  # [R, n, _BLOCK]
    _, best = jax.lax.top_k(jnp.max(blocks, axis=-1), min(k, blocks.shape[1]))
    best = jnp.sort(best, axis=-1)  # so that of equal values the lower index comes first
    within = jnp.take_along_axis(blocks, best[:, :, None], axis=1)  # [R, k, _BLOCK]
    values, places = jax.lax.top_k(within.reshape(within.shape[0], -1), k)
    block = jnp.take_along_axis(best, places // _BLOCK, axis=-1)
    return values, (block * _BLOCK + places % _BLOCK).astype(jnp.int32)


def _in_blocks(values: jax.Array, fill: float) -> jax.Array:
    """Cuts [R, V] into [R, n, _BLOCK], padded with `fill`."""
    padding = -values.shape[-1] % _BLOCK
    return jnp.pad(values, ((0, 0), (0, padding)), constant_values=fill).reshape(values.shape[0], -1, _BLOCK)


def _kept_probs(logits: jax.Array, batch: SamplingBatch) -> jax.Array:
    """Returns [R, V] unnormalised probabilities, 1 for the most likely token and 0 for what is cut off."""
    temperature = jnp.where(batch.temperature > 0, batch.temperature, 1)[:, None]
    # Subtract, then divide: the most likely token is exactly 1, which min_p = 1 relies on.
    probs = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature)
    probs = jnp.where(probs >= batch.min_p[:, None], probs, 0)
    probs = jax.lax.cond(jnp.any(batch.top_k > 0), _keep_top_k, lambda probs, _: probs, probs, batch.top_k)
    return jax.lax.cond(jnp.any(batch.top_p < 1), _keep_top_p, lambda probs, _: probs, probs, batch.top_p)


def _keep_top_k(probs: jax.Array, top_k: jax.Array) -> jax.Array:
    """Zeroes what lies below the k-th probability; ties with it stay."""
    count = jnp.where(top_k > 0, top_k, probs.shape[-1])
    return _keep_most_likely(probs, lambda kept: jnp.sum(kept, axis=-1) >= count)


def _keep_top_p(probs: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keeps the fewest most likely tokens whose share reaches top_p; ties with the last one stay."""
    needed = jnp.where(top_p < 1, top_p * jnp.sum(probs, axis=-1), jnp.inf)
    return _keep_most_likely(probs, lambda kept: jnp.sum(jnp.where(kept, probs, 0), axis=-1) >= needed)


def _keep_most_likely(probs: jax.Array, is_enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Zeroes what lies below the highest threshold that still keeps enough: no sort of the vocabulary.

    Non-negative floats order as their bits do, so 30 halvings of the bits from 0 to 1.0 find it exactly.
    """
    bits = jax.lax.bitcast_convert_type(probs, jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # enough at low, not enough at high
        middle = (low + high) // 2
        enough = is_enough(bits >= middle[:, None])
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    rows = probs.shape[0]
    low, _ = jax.lax.fori_loop(0, 31, halve, (jnp.zeros(rows, jnp.int32), jnp.full(rows, _ONE + 1, jnp.int32)))
    return jnp.where(bits >= low[:, None], probs, 0)


def _draw(probs: jax.Array, batch: SamplingBatch) -> jax.Array:
    """Draws from unnormalised probabilities [R, V] with two uniform numbers a row.

    The first picks a block of tokens by its share, the second a token within it. The numbers come from the
    row's seed and position alone.
    """
    uniform = jax.vmap(_uniform_pair)(batch.seeds, batch.positions)  # [R, 2]
    blocks = _in_blocks(probs, 0)
    block = _invert_cdf(jnp.sum(blocks, axis=-1), uniform[:, 0])  # [R]
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # [R, _BLOCK]
    return block * _BLOCK + _invert_cdf(within, uniform[:, 1])


def _uniform_pair(seed: jax.Array, position: jax.Array) -> jax.Array:
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, position), (2,))


def _invert_cdf(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Returns [R] int32, the first index whose running sum of weights [R, n] passes uniform [R] of the total."""
    running = jnp.cumsum(weights, axis=-1)
    passes = (running > uniform[:, None] * running[:, -1:]) & (weights > 0)
    found = jnp.argmax(passes, axis=-1)
    likeliest = jnp.argmax(weights, axis=-1)  # where rounding left nothing past the target
    return jnp.where(jnp.any(passes, axis=-1), found, likeliest).astype(jnp.int32)
