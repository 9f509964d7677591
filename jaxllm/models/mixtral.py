"""Mixtral: Llama with a mixture of experts in place of each MLP."""

from functools import partial

import jax.numpy as jnp
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.layers.attention import Attention
from jaxllm.layers.decoder import PreNormLayer
from jaxllm.layers.moe import Experts, Gated, MoE
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import make_rope
from jaxllm.layers.router import SoftmaxRouter
from jaxllm.models.causal_lm import Family
from jaxllm.models.weight_map import Weight, attention_weights, expert_weights, pre_norm_weights


def build_layer(config: ModelConfig, index: int, dtype: jnp.dtype) -> nnx.Module:
    """Declares layer `index`."""
    norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
    rope = make_rope(config.rotary_dim, config.rope_theta, config.rope_scaling)
    attention = Attention(config, dtype, rope=rope, window=config.window(index))
    num_experts, num_chosen = config.extra["num_experts"], config.extra["num_experts_per_tok"]
    router = SoftmaxRouter(config.hidden_size, num_experts, num_chosen, is_normalised=True)
    experts = Experts(num_experts, config.hidden_size, config.intermediate_size, Gated(config.hidden_act), dtype)
    return PreNormLayer(norm(), attention, norm(), MoE(router, experts))


def layer_weights(config: ModelConfig, index: int) -> dict[str, Weight]:
    """Returns the weights of layer `index`, by parameter path within the layer."""
    name = f"model.layers.{index}.block_sparse_moe"
    return {
        **pre_norm_weights(index),
        **attention_weights(index, qkv_bias=False, out_bias=False),
        "mlp.router.scores.weight": Weight((f"{name}.gate.weight",)),
        **expert_weights(f"{name}.experts", config.extra["num_experts"], gate="w1", up="w3", down="w2"),
    }


FAMILY = Family(build_layer, layer_weights)
