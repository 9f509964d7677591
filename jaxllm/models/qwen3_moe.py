"""Qwen 3 with a mixture of experts in some or all layers."""

from functools import partial

import jax.numpy as jnp
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.layers.decoder import PreNormLayer
from jaxllm.layers.moe import Experts, Gated, MoE
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.router import SoftmaxRouter
from jaxllm.models import qwen3
from jaxllm.models.causal_lm import Family
from jaxllm.models.weight_map import (
    Weight,
    attention_weights,
    expert_weights,
    head_norm_weights,
    pre_norm_weights,
)


def build_layer(config: ModelConfig, index: int, dtype: jnp.dtype) -> nnx.Module:
    """Declares layer `index`."""
    if index not in config.extra["sparse_layers"]:
        return qwen3.build_layer(config, index, dtype)
    extra, norm = config.extra, partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
    num_experts = extra["num_experts"]
    router = SoftmaxRouter(
        config.hidden_size, num_experts, extra["num_experts_per_tok"], is_normalised=extra["norm_topk_prob"]
    )
    experts = Experts(num_experts, config.hidden_size, extra["moe_intermediate_size"], Gated(config.hidden_act), dtype)
    return PreNormLayer(norm(), qwen3.build_attention(config, index, dtype), norm(), MoE(router, experts))


def layer_weights(config: ModelConfig, index: int) -> dict[str, Weight]:
    """Returns the weights of layer `index`, by parameter path within the layer."""
    if index not in config.extra["sparse_layers"]:
        return qwen3.layer_weights(config, index)
    name = f"model.layers.{index}.mlp"
    return {
        **pre_norm_weights(index),
        **attention_weights(index, qkv_bias=config.attention_bias, out_bias=config.attention_bias),
        **head_norm_weights(index),
        "mlp.router.scores.weight": Weight((f"{name}.gate.weight",)),
        **expert_weights(f"{name}.experts", config.extra["num_experts"]),
    }


FAMILY = Family(build_layer, layer_weights)
