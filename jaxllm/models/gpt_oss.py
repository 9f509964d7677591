"""gpt-oss: sinks, windows in every second layer, biases everywhere, experts with a clamped activation."""

from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.layers.attention import Attention
from jaxllm.layers.decoder import PreNormLayer
from jaxllm.layers.moe import ClampedGated, Experts, MoE
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import make_rope
from jaxllm.layers.router import SoftmaxRouter
from jaxllm.models.causal_lm import Family
from jaxllm.models.weight_map import Weight, attention_weights, linear_weights, pre_norm_weights


def build_layer(config: ModelConfig, index: int, dtype: jnp.dtype) -> nnx.Module:
    """Declares layer `index`."""
    extra, norm = config.extra, partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
    attention = Attention(
        config,
        dtype,
        rope=make_rope(config.rotary_dim, config.rope_theta, config.rope_scaling),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        window=config.window(index),
        has_sinks=True,
    )
    # Its softmax over the chosen experts alone is the softmax over all, normalised.
    router = SoftmaxRouter(
        config.hidden_size, extra["num_experts"], extra["num_experts_per_tok"], is_normalised=True, has_bias=True
    )
    combine = ClampedGated(extra["swiglu_alpha"], extra["swiglu_limit"])
    experts = Experts(extra["num_experts"], config.hidden_size, config.intermediate_size, combine, dtype, has_bias=True)
    return PreNormLayer(norm(), attention, norm(), MoE(router, experts))


def layer_weights(config: ModelConfig, index: int) -> dict[str, Weight]:
    """Returns the weights of layer `index`, by parameter path within the layer."""
    name = f"model.layers.{index}"
    experts = f"{name}.mlp.experts"
    return {
        **pre_norm_weights(index),
        **attention_weights(index, qkv_bias=config.attention_bias, out_bias=config.attention_bias),
        "attention.sinks": Weight((f"{name}.self_attn.sinks",)),
        **linear_weights("mlp.router.scores", (f"{name}.mlp.router",), has_bias=True),
        "mlp.experts.gate_up": Weight((f"{experts}.gate_up_proj",), _gate_first),
        "mlp.experts.gate_up_bias": Weight((f"{experts}.gate_up_proj_bias",), _gate_first),
        "mlp.experts.down": Weight((f"{experts}.down_proj",)),
        "mlp.experts.down_bias": Weight((f"{experts}.down_proj_bias",)),
    }


def _gate_first(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Parts gate and up, which stand alternately along the last dimension."""
    (values,) = parts
    return np.concatenate([values[..., 0::2], values[..., 1::2]], axis=-1)


FAMILY = Family(build_layer, layer_weights)
