"""SmolLM3: Llama where some layers rotate nothing."""

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
from jaxllm.models.causal_lm import Family


def build_layer(config: ModelConfig, index: int, dtype: jnp.dtype) -> nnx.Module:
    """Declares layer `index`."""
    norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
    rope = make_rope(config.rotary_dim, config.rope_theta, config.rope_scaling)
    bias = config.attention_bias
    attention = Attention(
        config,
        dtype,
        rope=rope if config.extra["rope_layers"][index] else None,
        qkv_bias=bias,
        out_bias=bias,
        window=config.window(index),
    )
    mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act, dtype, has_bias=config.mlp_bias)
    return PreNormLayer(norm(), attention, norm(), mlp)


FAMILY = Family(build_layer, llama.layer_weights)
