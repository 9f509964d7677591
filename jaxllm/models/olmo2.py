"""OLMo 2: norms after each block instead of before, and one norm over all heads of queries, one over those of keys."""

from functools import partial

import jax.numpy as jnp
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.layers.attention import Attention
from jaxllm.layers.decoder import OutputNormLayer
from jaxllm.layers.mlp import GatedMLP
from jaxllm.layers.norm import JointHeadNorms, RMSNorm
from jaxllm.layers.rope import make_rope
from jaxllm.models.causal_lm import Family
from jaxllm.models.weight_map import Weight, attention_weights, gated_mlp_weights, head_norm_weights


def build_layer(config: ModelConfig, index: int, dtype: jnp.dtype) -> nnx.Module:
    """Declares layer `index`."""
    norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
    attention = Attention(
        config,
        dtype,
        rope=make_rope(config.rotary_dim, config.rope_theta, config.rope_scaling),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        head_norms=JointHeadNorms(
            config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rms_norm_eps
        ),
    )
    mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act, dtype)
    return OutputNormLayer(attention, norm(), mlp, norm())


def layer_weights(config: ModelConfig, index: int) -> dict[str, Weight]:
    """Returns the weights of layer `index`, by parameter path within the layer."""
    name = f"model.layers.{index}"
    return {
        **attention_weights(index, qkv_bias=config.attention_bias, out_bias=config.attention_bias),
        **head_norm_weights(index),
        "attention_out_norm.weight": Weight((f"{name}.post_attention_layernorm.weight",)),
        **gated_mlp_weights(index, has_bias=False),
        "mlp_out_norm.weight": Weight((f"{name}.post_feedforward_layernorm.weight",)),
    }


FAMILY = Family(build_layer, layer_weights)
