"""Granite 3: Llama with multipliers on the embedding, the scores, what a layer adds, and the logits."""

from functools import partial

import jax.numpy as jnp
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.layers.attention import Attention
from jaxllm.layers.decoder import PreNormLayer
from jaxllm.layers.mlp import GatedMLP
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import make_rope
from jaxllm.models import llama
from jaxllm.models.causal_lm import Family, Frame


def build_layer(config: ModelConfig, index: int, dtype: jnp.dtype) -> nnx.Module:
    """Declares layer `index`."""
    norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
    attention = Attention(
        config,
        dtype,
        rope=make_rope(config.rotary_dim, config.rope_theta, config.rope_scaling),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        scale=config.extra["attention_multiplier"],
    )
    mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act, dtype, has_bias=config.mlp_bias)
    return PreNormLayer(norm(), attention, norm(), mlp, config.extra["residual_multiplier"])


def _build_frame(config: ModelConfig, dtype: jnp.dtype, hidden_dtype: jnp.dtype) -> Frame:
    return Frame(
        config,
        dtype,
        hidden_dtype,
        norm=RMSNorm(config.hidden_size, config.rms_norm_eps),
        embed_scale=config.extra["embedding_multiplier"],
        logits_scale=1 / config.extra["logits_scaling"],
    )


FAMILY = Family(build_layer, llama.layer_weights, _build_frame)
