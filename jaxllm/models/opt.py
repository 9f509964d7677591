"""OPT: learnt positions from 2 on, layer norms before or after each block, a plain MLP."""

from functools import partial

import jax.numpy as jnp
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.layers.attention import Attention
from jaxllm.layers.decoder import PostNormLayer, PreNormLayer
from jaxllm.layers.embedding import LearnedPositions
from jaxllm.layers.mlp import MLP
from jaxllm.layers.norm import LayerNorm
from jaxllm.models.causal_lm import Family, Frame
from jaxllm.models.weight_map import Weight, linear_weights

_FIRST_POSITION = 2
_ROOT = "model.decoder"


def build_layer(config: ModelConfig, index: int, dtype: jnp.dtype) -> nnx.Module:
    """Declares layer `index`."""
    attention = Attention(config, dtype, rope=None, qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act, dtype, has_bias=config.mlp_bias)
    norm = partial(_norm, config)
    if config.extra["do_layer_norm_before"]:
        return PreNormLayer(norm(), attention, norm(), mlp)
    return PostNormLayer(attention, norm(), mlp, norm())


def layer_weights(config: ModelConfig, index: int) -> dict[str, Weight]:
    """Returns the weights of layer `index`, by parameter path within the layer."""
    name = f"{_ROOT}.layers.{index}"
    return {
        **_norm_weights(config, "attention_norm", f"{name}.self_attn_layer_norm"),
        **_norm_weights(config, "mlp_norm", f"{name}.final_layer_norm"),
        **linear_weights(
            "attention.qkv", tuple(f"{name}.self_attn.{part}_proj" for part in "qkv"), config.attention_bias
        ),
        **linear_weights("attention.out", (f"{name}.self_attn.out_proj",), config.attention_bias),
        **linear_weights("mlp.up", (f"{name}.fc1",), config.mlp_bias),
        **linear_weights("mlp.down", (f"{name}.fc2",), config.mlp_bias),
    }


def _build_frame(config: ModelConfig, dtype: jnp.dtype, hidden_dtype: jnp.dtype) -> Frame:
    return Frame(
        config,
        dtype,
        hidden_dtype,
        norm=_norm(config) if config.extra["has_final_norm"] else None,
        positions=LearnedPositions(config.max_position_embeddings, config.hidden_size, dtype, _FIRST_POSITION),
        embed_size=config.extra["word_embed_proj_dim"],
    )


def _frame_weights(config: ModelConfig) -> dict[str, Weight]:
    weights = {
        "frame.embed.weight": Weight((f"{_ROOT}.embed_tokens.weight",)),
        "frame.positions.weight": Weight((f"{_ROOT}.embed_positions.weight",)),
    }
    if config.extra["has_final_norm"]:
        weights |= _norm_weights(config, "frame.norm", f"{_ROOT}.final_layer_norm")
    if config.extra["word_embed_proj_dim"] != config.hidden_size:
        weights["frame.project_in.weight"] = Weight((f"{_ROOT}.project_in.weight",))
        weights["frame.project_out.weight"] = Weight((f"{_ROOT}.project_out.weight",))
    if not config.tie_word_embeddings:
        weights["frame.lm_head.weight"] = Weight(("lm_head.weight",))
    return weights


def _norm(config: ModelConfig) -> LayerNorm:
    has_weights = config.extra["layer_norm_elementwise_affine"]
    return LayerNorm(config.hidden_size, config.rms_norm_eps, has_weights=has_weights)


def _norm_weights(config: ModelConfig, path: str, name: str) -> dict[str, Weight]:
    if not config.extra["layer_norm_elementwise_affine"]:
        return {}
    return {f"{path}.weight": Weight((f"{name}.weight",)), f"{path}.bias": Weight((f"{name}.bias",))}


FAMILY = Family(build_layer, layer_weights, _build_frame, _frame_weights)
