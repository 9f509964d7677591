"""Gemma 2 and 3 (text): four norms a layer, stored as distances from 1; windows; soft caps; a scaled embedding."""

from functools import partial

import jax.numpy as jnp
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.layers.attention import Attention
from jaxllm.layers.decoder import SandwichNormLayer
from jaxllm.layers.mlp import GatedMLP
from jaxllm.layers.norm import HeadNorms, RMSNorm
from jaxllm.layers.rope import make_rope
from jaxllm.models.causal_lm import Family, Frame
from jaxllm.models.weight_map import (
    Weight,
    attention_weights,
    frame_weights,
    gated_mlp_weights,
    head_norm_weights,
    plus_one,
)

_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


def build_layer(config: ModelConfig, index: int, dtype: jnp.dtype) -> nnx.Module:
    """Declares layer `index`. Gemma 3 also has head norms, and another rotation for layers with a window."""
    extra, window = config.extra, config.window(index)
    rope = make_rope(config.rotary_dim, config.rope_theta, config.rope_scaling)
    if _is_gemma3(config) and window is not None:
        rope = make_rope(config.rotary_dim, extra["rope_local_base_freq"], None)
    attention = Attention(
        config,
        dtype,
        rope=rope,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        head_norms=HeadNorms(config.head_dim, config.rms_norm_eps) if _is_gemma3(config) else None,
        window=window,
        scale=extra["query_pre_attn_scalar"] ** -0.5,
        soft_cap=extra["attn_logit_softcapping"],
    )
    norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
    mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act, dtype)
    return SandwichNormLayer(norm(), attention, norm(), norm(), mlp, norm())


def layer_weights(config: ModelConfig, index: int) -> dict[str, Weight]:
    """Returns the weights of layer `index`, by parameter path within the layer."""
    weights = {
        **attention_weights(index, qkv_bias=config.attention_bias, out_bias=config.attention_bias),
        **gated_mlp_weights(index, has_bias=False),
    }
    norms = {f"{ours}.weight": Weight((f"model.layers.{index}.{theirs}.weight",)) for ours, theirs in _NORMS.items()}
    if _is_gemma3(config):
        norms |= head_norm_weights(index)
    return weights | {path: weight._replace(arrange=plus_one) for path, weight in norms.items()}


def _is_gemma3(config: ModelConfig) -> bool:
    return config.architecture == "Gemma3ForCausalLM"


def _build_frame(config: ModelConfig, dtype: jnp.dtype, hidden_dtype: jnp.dtype) -> Frame:
    return Frame(
        config,
        dtype,
        hidden_dtype,
        norm=RMSNorm(config.hidden_size, config.rms_norm_eps),
        embed_scale=config.hidden_size**0.5,
        logits_soft_cap=config.extra["final_logit_softcapping"],
    )


def _frame_weights(config: ModelConfig) -> dict[str, Weight]:
    weights = frame_weights(config)
    return weights | {"frame.norm.weight": weights["frame.norm.weight"]._replace(arrange=plus_one)}


FAMILY = Family(build_layer, layer_weights, _build_frame, _frame_weights)
