"""Qwen 2 and 2.5: Llama with biases on query, key and value alone."""

from functools import partial

import jax.numpy as jnp
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.layers.attention import Attention
from jaxllm.layers.decoder import PreNormLayer
from jaxllm.layers.mlp import GatedMLP
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import make_rope
from jaxllm.models.causal_lm import Family
from jaxllm.models.weight_map import Weight, attention_weights, gated_mlp_weights, pre_norm_weights


def build_layer(config: ModelConfig, index: int, dtype: jnp.dtype) -> nnx.Module:
    """Declares layer `index`."""
    norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
    rope = make_rope(config.rotary_dim, config.rope_theta, config.rope_scaling)
    attention = Attention(config, dtype, rope=rope, qkv_bias=True, window=config.window(index))
    mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act, dtype)
    return PreNormLayer(norm(), attention, norm(), mlp)


def layer_weights(config: ModelConfig, index: int) -> dict[str, Weight]:
    """Returns the weights of layer `index`, by parameter path within the layer."""
    return {
        **pre_norm_weights(index),
        **attention_weights(index, qkv_bias=True, out_bias=False),
        **gated_mlp_weights(index, has_bias=False),
    }


FAMILY = Family(build_layer, layer_weights)
