"""Qwen 3: Llama with a norm on each head of queries and keys."""

from functools import partial

import jax.numpy as jnp
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.layers.attention import Attention
from jaxllm.layers.decoder import PreNormLayer
from jaxllm.layers.mlp import GatedMLP
from jaxllm.layers.norm import HeadNorms, RMSNorm
from jaxllm.layers.rope import make_rope
from jaxllm.models.causal_lm import Family
from jaxllm.models.weight_map import (
    Weight,
    attention_weights,
    gated_mlp_weights,
    head_norm_weights,
    pre_norm_weights,
)


def build_layer(config: ModelConfig, index: int, dtype: jnp.dtype) -> nnx.Module:
    """Declares layer `index`."""
    norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
    mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act, dtype)
    return PreNormLayer(norm(), build_attention(config, index, dtype), norm(), mlp)


def build_attention(config: ModelConfig, index: int, dtype: jnp.dtype) -> Attention:
    """Declares the attention of layer `index`."""
    return Attention(
        config,
        dtype,
        rope=make_rope(config.rotary_dim, config.rope_theta, config.rope_scaling),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        head_norms=HeadNorms(config.head_dim, config.rms_norm_eps),
        window=config.window(index),
    )


def layer_weights(config: ModelConfig, index: int) -> dict[str, Weight]:
    """Returns the weights of layer `index`, by parameter path within the layer."""
    return {
        **pre_norm_weights(index),
        **attention_weights(index, qkv_bias=config.attention_bias, out_bias=config.attention_bias),
        **head_norm_weights(index),
        **gated_mlp_weights(index, has_bias=False),
    }


FAMILY = Family(build_layer, layer_weights)
