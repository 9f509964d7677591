"""Phi-3 and Phi-4-mini: Llama stored with fused projections, some with a part of each head rotated."""

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
from jaxllm.models.weight_map import Weight, pre_norm_weights


def build_layer(config: ModelConfig, index: int, dtype: jnp.dtype) -> nnx.Module:
    """Declares layer `index`."""
    norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
    rope = make_rope(config.rotary_dim, config.rope_theta, config.rope_scaling)
    attention = Attention(config, dtype, rope=rope, window=config.window(index))
    mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act, dtype)
    return PreNormLayer(norm(), attention, norm(), mlp)


def layer_weights(config: ModelConfig, index: int) -> dict[str, Weight]:
    """Returns the weights of layer `index`, by parameter path within the layer. The files join them as we do."""
    name = f"model.layers.{index}"
    return {
        **pre_norm_weights(index),
        "attention.qkv.weight": Weight((f"{name}.self_attn.qkv_proj.weight",)),
        "attention.out.weight": Weight((f"{name}.self_attn.o_proj.weight",)),
        "mlp.gate_up.weight": Weight((f"{name}.mlp.gate_up_proj.weight",)),
        "mlp.down.weight": Weight((f"{name}.mlp.down_proj.weight",)),
    }


FAMILY = Family(build_layer, layer_weights)
