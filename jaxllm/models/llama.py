"""The Llama family: pre-norm layers of grouped-query attention and a gated MLP."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.layers.attention import Attention, LayerCache
from jaxllm.layers.forward_batch import ForwardBatch
from jaxllm.layers.mlp import GatedMLP
from jaxllm.layers.norm import RMSNorm
from jaxllm.models.weight_map import Weight, linear_weights


class LlamaLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, has_bias=config.mlp_bias, dtype=dtype)

    def __call__(self, x: jax.Array, batch: ForwardBatch, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        """Maps x: [T, M] to [T, M], and the layer's cache to the cache with this step's tokens in it."""
        attended, cache = self.attention(self.attention_norm(x), batch, cache)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache


def build_layer(config: ModelConfig, index: int, dtype: jnp.dtype) -> nnx.Module:
    """Declares layer `index`."""
    return LlamaLayer(config, dtype)


def layer_weights(config: ModelConfig, index: int) -> dict[str, Weight]:
    """Returns the weights of layer `index`, by parameter path within the layer."""
    name = f"model.layers.{index}"
    projections = tuple(f"{name}.self_attn.{part}_proj" for part in "qkv")
    return {
        "attention_norm.weight": Weight((f"{name}.input_layernorm.weight",)),
        "mlp_norm.weight": Weight((f"{name}.post_attention_layernorm.weight",)),
        **linear_weights("attention.qkv", projections, config.attention_bias),
        **linear_weights("attention.out", (f"{name}.self_attn.o_proj",), config.attention_bias),
        **linear_weights("mlp.gate_up", (f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"), config.mlp_bias),
        **linear_weights("mlp.down", (f"{name}.mlp.down_proj",), config.mlp_bias),
    }
