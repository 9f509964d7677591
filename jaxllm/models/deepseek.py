"""DeepSeek V2 and V3: latent attention; after some dense layers, experts in groups beside one that all tokens share."""

from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.layers.decoder import PreNormLayer
from jaxllm.layers.latent_attention import LatentAttention, LatentSizes
from jaxllm.layers.mlp import GatedMLP
from jaxllm.layers.moe import Experts, Gated, MoE
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import make_rope, yarn_mscale
from jaxllm.layers.router import SigmoidRouter, SoftmaxRouter
from jaxllm.models import causal_lm
from jaxllm.models.causal_lm import Family
from jaxllm.models.weight_map import Weight, expert_weights, gated_mlp_weights, linear_weights, pre_norm_weights


def build_layer(config: ModelConfig, index: int, dtype: jnp.dtype) -> nnx.Module:
    """Declares layer `index`."""
    norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
    sizes = _sizes(config)
    attention = LatentAttention(
        sizes,
        dtype,
        rope=make_rope(sizes.rotated, config.rope_theta, config.rope_scaling),
        scale=sizes.query**-0.5 * _scale_of_yarn(config) ** 2,
        has_bias=config.attention_bias,
    )
    return PreNormLayer(norm(), attention, norm(), _build_mlp(config, index, dtype))


def _build_mlp(config: ModelConfig, index: int, dtype: jnp.dtype) -> GatedMLP | MoE:
    mlp = partial(GatedMLP, activation=config.hidden_act, dtype=dtype, has_bias=config.mlp_bias)
    extra, hidden_size = config.extra, config.hidden_size
    if index < extra["num_dense"]:
        return mlp(hidden_size, config.intermediate_size)
    num_experts, inner_size = extra["num_experts"], extra["moe_intermediate_size"]
    router = (SigmoidRouter if _is_v3(config) else SoftmaxRouter)(
        hidden_size,
        num_experts,
        extra["num_experts_per_tok"],
        is_normalised=extra["norm_topk_prob"],
        scale=extra["routed_scaling_factor"],
        num_groups=extra["num_groups"],
        num_chosen_groups=extra["num_chosen_groups"],
    )
    experts = Experts(num_experts, hidden_size, inner_size, Gated(config.hidden_act), dtype)
    return MoE(router, experts, mlp(hidden_size, inner_size * extra["num_shared"]))


def layer_weights(config: ModelConfig, index: int) -> dict[str, Weight]:
    """Returns the weights of layer `index`, by parameter path within the layer."""
    weights = {**pre_norm_weights(index), **_attention_weights(config, f"model.layers.{index}.self_attn")}
    if index < config.extra["num_dense"]:
        return weights | gated_mlp_weights(index, config.mlp_bias)
    name = f"model.layers.{index}.mlp"
    if _is_v3(config):
        weights["mlp.router.correction"] = Weight((f"{name}.gate.e_score_correction_bias",))
    return {
        **weights,
        "mlp.router.scores.weight": Weight((f"{name}.gate.weight",)),
        **expert_weights(f"{name}.experts", config.extra["num_experts"]),
        **gated_mlp_weights(index, config.mlp_bias, "mlp.shared_experts", "mlp.shared"),
    }


def _attention_weights(config: ModelConfig, name: str) -> dict[str, Weight]:
    sizes, bias = _sizes(config), config.attention_bias
    is_pairwise = config.extra["is_interleaved"]
    queries = partial(_halves_last, num_heads=sizes.heads, num_rotated=sizes.rotated if is_pairwise else 0)
    keys = partial(_halves_last, num_heads=1, num_rotated=sizes.rotated if is_pairwise else 0)
    q_name = f"{name}.q_proj" if sizes.query_latent is None else f"{name}.q_b_proj"
    weights = {
        "attention.q.weight": Weight((f"{q_name}.weight",), queries),
        "attention.kv_in.weight": Weight((f"{name}.kv_a_proj_with_mqa.weight",), keys),
        "attention.kv_norm.weight": Weight((f"{name}.kv_a_layernorm.weight",)),
        "attention.kv_out": Weight((f"{name}.kv_b_proj.weight",), partial(_by_head, num_heads=sizes.heads)),
        **linear_weights("attention.out", (f"{name}.o_proj",), bias),
    }
    if bias:
        weights["attention.kv_in.bias"] = Weight((f"{name}.kv_a_proj_with_mqa.bias",), keys)
    if sizes.query_latent is not None:
        weights |= linear_weights("attention.q_in", (f"{name}.q_a_proj",), bias)
        weights["attention.q_norm.weight"] = Weight((f"{name}.q_a_layernorm.weight",))
    return weights


def _halves_last(parts: Sequence[np.ndarray], num_heads: int, num_rotated: int) -> np.ndarray:
    """Reorders the last num_rotated rows of each head, where neighbours are rotated together, to two halves.

    Four such rows 0 1 2 3 become 0 2 1 3, as layers/rope.py has them.
    """
    (values,) = parts
    heads = values.reshape(num_heads, -1, *values.shape[1:])
    first = heads.shape[1] - num_rotated
    order = [*range(first), *range(first, heads.shape[1], 2), *range(first + 1, heads.shape[1], 2)]
    return heads[:, order].reshape(values.shape)


def _by_head(parts: Sequence[np.ndarray], num_heads: int) -> np.ndarray:
    """Cuts the rows [H * D, latent] into heads [H, D, latent]."""
    (values,) = parts
    return values.reshape(num_heads, -1, values.shape[-1])


def _sizes(config: ModelConfig) -> LatentSizes:
    return LatentSizes(hidden=config.hidden_size, heads=config.num_attention_heads, **config.extra["latent_sizes"])


def _scale_of_yarn(config: ModelConfig) -> float:
    scaling = config.rope_scaling or {}
    if not scaling.get("mscale_all_dim"):
        return 1.0
    return yarn_mscale(scaling["factor"], scaling["mscale_all_dim"])


def _is_v3(config: ModelConfig) -> bool:
    return config.architecture == "DeepseekV3ForCausalLM"


def _is_ignored(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is of the layer after the last, which guesses a second token ahead."""
    return causal_lm.is_ignored(config, name) or name.startswith(f"model.layers.{config.num_hidden_layers}.")


FAMILY = Family(build_layer, layer_weights, is_ignored=_is_ignored)
