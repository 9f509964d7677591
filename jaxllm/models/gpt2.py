"""GPT-2: learnt positions, layer norms, biases, a plain MLP. Its matrices are stored as [in, out]."""

from functools import partial

import jax.numpy as jnp
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.layers.attention import Attention
from jaxllm.layers.decoder import PreNormLayer
from jaxllm.layers.embedding import LearnedPositions
from jaxllm.layers.mlp import MLP
from jaxllm.layers.norm import LayerNorm
from jaxllm.models.causal_lm import Family, Frame
from jaxllm.models.weight_map import Weight, transposed


def build_layer(config: ModelConfig, index: int, dtype: jnp.dtype) -> nnx.Module:
    """Declares layer `index`."""
    norm = partial(LayerNorm, config.hidden_size, config.rms_norm_eps)
    scale = config.head_dim**-0.5 if config.extra["scale_attn_weights"] else 1.0
    if config.extra["scale_attn_by_inverse_layer_idx"]:
        scale /= index + 1
    attention = Attention(config, dtype, rope=None, qkv_bias=True, out_bias=True, scale=scale)
    mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act, dtype, has_bias=True)
    return PreNormLayer(norm(), attention, norm(), mlp)


def layer_weights(config: ModelConfig, index: int) -> dict[str, Weight]:
    """Returns the weights of layer `index`, by parameter path within the layer."""
    name = f"transformer.h.{index}"
    weights = {}
    for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
        weights[f"{ours}.weight"] = Weight((f"{name}.{theirs}.weight",))
        weights[f"{ours}.bias"] = Weight((f"{name}.{theirs}.bias",))
    for ours, theirs in (
        ("attention.qkv", "attn.c_attn"),
        ("attention.out", "attn.c_proj"),
        ("mlp.up", "mlp.c_fc"),
        ("mlp.down", "mlp.c_proj"),
    ):
        weights[f"{ours}.weight"] = Weight((f"{name}.{theirs}.weight",), transposed)
        weights[f"{ours}.bias"] = Weight((f"{name}.{theirs}.bias",))
    return weights


def _build_frame(config: ModelConfig, dtype: jnp.dtype, hidden_dtype: jnp.dtype) -> Frame:
    norm = LayerNorm(config.hidden_size, config.rms_norm_eps)
    positions = LearnedPositions(config.max_position_embeddings, config.hidden_size, dtype)
    return Frame(config, dtype, hidden_dtype, norm=norm, positions=positions)


def _frame_weights(config: ModelConfig) -> dict[str, Weight]:
    weights = {
        "frame.embed.weight": Weight(("transformer.wte.weight",)),
        "frame.positions.weight": Weight(("transformer.wpe.weight",)),
        "frame.norm.weight": Weight(("transformer.ln_f.weight",)),
        "frame.norm.bias": Weight(("transformer.ln_f.bias",)),
    }
    if not config.tie_word_embeddings:
        weights["frame.lm_head.weight"] = Weight(("lm_head.weight",))
    return weights


def _is_mask(config: ModelConfig, name: str) -> bool:
    return name.endswith((".attn.bias", ".attn.masked_bias"))


FAMILY = Family(
    build_layer,
    layer_weights,
    _build_frame,
    _frame_weights,
    prefix="transformer.",
    is_ignored=_is_mask,
)
