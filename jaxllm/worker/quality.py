"""Compares a model as an engine would hold it with the same model in float32: token for token, on given texts."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.config import EngineConfig
from jaxllm.model_loader.loader import load_model
from jaxllm.models.causal_lm import CausalLM
from jaxllm.worker.cache_engine import layout_of
from jaxllm.worker.kv_calibration import calibrate_cache
from jaxllm.worker.plan import cache_dtype_of
from jaxllm.worker.step_fn import split_model
from jaxllm.worker.whole_texts import WholeTexts
from sharding.mesh import make_mesh

_ROWS = 64  # tokens whose logits are held at a time
_FLOAT32 = jnp.dtype(jnp.float32)


@dataclass(frozen=True)
class Quality:
    """What quantization costs and saves.

    Attributes:
      num_tokens: Tokens that were predicted.
      mean_kl: Mean over them of the divergence of the next token's distribution from float32's, in nats.
      reference_perplexity: Of the text, in float32.
      perplexity: As the engine would hold the model.
      float32_bytes: Of the weights.
      bfloat16_bytes: Of the weights.
      weight_bytes: As the engine would hold them, scales and all.
    """

    num_tokens: int
    mean_kl: float
    reference_perplexity: float
    perplexity: float
    float32_bytes: int
    bfloat16_bytes: int
    weight_bytes: int


def measure_quality(config: EngineConfig, texts: list[list[int]], num_given: int) -> Quality:
    """Predicts each text's tokens with both models, which are held at the same time.

    Args:
      config: Of the engine; its quantization and cache_dtype are what is measured.
      texts: Token ids, all as long.
      num_given: Tokens at the beginning of each that aren't predicted.
    """
    floats = replace(config, dtype="float32", quantization=None, cache=replace(config.cache, cache_dtype="auto"))
    reference, reference_bytes = _load(floats)
    measured, weight_bytes = _load(config)
    compare = jax.jit(_compare)
    total = np.zeros(3)
    for text in texts:
        token_ids = np.asarray([text])
        runs = [model.run(token_ids) for model in (reference, measured)]
        for first in range(num_given - 1, len(text) - 1, _ROWS):
            indices = np.arange(first, first + _ROWS).clip(max=len(text) - 2).astype(np.int32)
            weights = (np.arange(first, first + _ROWS) <= len(text) - 2).astype(np.float32)
            logits = [model.logits(hidden, indices) for model, hidden in zip((reference, measured), runs, strict=True)]
            total += np.asarray(compare(*logits, token_ids[0, indices + 1], weights))
    num_tokens = len(texts) * (len(texts[0]) - num_given)
    mean_kl, reference_loss, loss = (total / num_tokens).tolist()
    perplexities = float(np.exp(reference_loss)), float(np.exp(loss))
    return Quality(num_tokens, mean_kl, *perplexities, reference_bytes, reference_bytes // 2, weight_bytes)


def _compare(reference: jax.Array, measured: jax.Array, token_ids: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns [3] sums over rows: the divergence, and the negative log probability of token_ids: [R] in both.

    reference and measured are logits [R, V]; weights: [R] are 0 for rows that don't count.
    """
    expected, got = jax.nn.log_softmax(reference), jax.nn.log_softmax(measured)
    divergence = jnp.sum(jnp.exp(expected) * (expected - got), axis=-1)
    losses = [-jnp.take_along_axis(logprobs, token_ids[:, None], axis=-1)[:, 0] for logprobs in (expected, got)]
    return jnp.stack([jnp.sum(weights * row) for row in (divergence, *losses)])


def _load(config: EngineConfig) -> tuple[WholeTexts, int]:
    """Returns the model, ready to run texts, and its weights' bytes."""
    platform = jax.default_backend()
    mesh = make_mesh(jax.local_devices()[:1])
    dtype = _FLOAT32 if config.dtype == "auto" else jnp.dtype(config.dtype)
    cache_dtype = cache_dtype_of(config, dtype)
    model = load_model(config, mesh, dtype, _FLOAT32)
    layout = layout_of(config, mesh, cache_dtype, platform)
    if cache_dtype == jnp.int8:
        calibrate_cache(config, mesh, [model], _FLOAT32, platform)
    return WholeTexts(split_model(model, 1), layout), _num_bytes(model)


def _num_bytes(model: CausalLM) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(nnx.split(model)[1]))
