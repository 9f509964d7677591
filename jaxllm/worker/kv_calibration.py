"""Scales of a KV cache of int8: measured once, when the model is loaded, and kept in its layers.

Some dimensions of keys are tens of times larger than the rest, in the same heads and dimensions whatever the text is:
a scale for each of them is what makes eight bits enough. So a text is run with a cache of floats, and the largest
magnitude of each dimension becomes the largest number. It has to be a text: on random tokens models make other keys,
and scales from those cost SmolLM2 five times as much.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.layers.attention import Attention
from jaxllm.layers.latent_attention import LatentAttention
from jaxllm.model_loader.checkpoint import open_checkpoint
from jaxllm.models.causal_lm import CausalLM
from jaxllm.tokenizer.loader import open_tokenizer
from jaxllm.worker.calibration_text import CALIBRATION_TEXT
from jaxllm.worker.step_fn import split_model
from jaxllm.worker.whole_texts import WholeTexts
from pallas_kernels.paged_attention import KVLayout

_LARGEST = 127


def calibrate_cache(
    model: CausalLM, layout: KVLayout, num_arrays: int, model_path: Path, max_model_len: int, dtype: jnp.dtype
) -> None:
    """Puts each layer's scales into its attention.

    Args:
      model: Loaded, its layers' cache_scales being ones.
      layout: Of the KV cache that is calibrated for.
      num_arrays: Arrays of a layer's cache.
      model_path: Of the checkpoint, whose tokenizer is used.
      max_model_len: The text is no longer.
      dtype: Of the cache of floats.
    """
    tokenizer = open_tokenizer(open_checkpoint(str(model_path)))
    token_ids = np.array([tokenizer.encode(CALIBRATION_TEXT)[:max_model_len]])
    floats = replace(layout, dtype=dtype)
    run = WholeTexts(split_model(model, 1), floats, num_arrays).run(token_ids)
    attentions = (node for _, node in nnx.iter_graph(model) if isinstance(node, Attention | LatentAttention))
    for attention, cache in zip(attentions, run.caches, strict=True):
        parameter = attention.cache_scales
        keys_and_values = cache if num_arrays < len(layout.block_shapes) else floats.unpack(cache)
        scales = np.stack([_scales(array) for array in keys_and_values[: len(parameter[...])]])
        parameter[...] = jax.device_put(scales, parameter[...].sharding)


def _scales(rows: jax.Array) -> np.ndarray:
    """Returns [K, D] float32 of rows: [N, P, K, D]; block 0 is nobody's."""
    largest = np.asarray(jnp.max(jnp.abs(rows[1:].astype(jnp.float32)), axis=(0, 1)))
    return np.where(largest == 0, 1, largest / _LARGEST).astype(np.float32)
