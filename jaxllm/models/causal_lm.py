"""A decoder: embedding, layers, norm, logits. Families bring the layer; models/registry.py lists them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.norm import RMSNorm


class Frame(nnx.Module):
    """What stands around the layers: the embedding before them, the norm and the logits after them."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, hidden_dtype: jnp.dtype) -> None:
        self.hidden_dtype = hidden_dtype
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = None if config.tie_word_embeddings else Embedding(config.vocab_size, config.hidden_size, dtype)

    def hidden(self, token_ids: jax.Array) -> jax.Array:
        """Maps token_ids: [T] to the first layer's input [T, M] in hidden_dtype."""
        with jax.named_scope("embed"):
            return self.embed(token_ids).astype(self.hidden_dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Maps the last layer's output [R, M] to float32 logits [R, V]."""
        with jax.named_scope("logits"):
            return (self.lm_head or self.embed).logits(self.norm(hidden))


class CausalLM(nnx.Module):
    """The frame and the layers. Build it under nnx.eval_shape; the loader brings the weights.

    Each layer maps (x: [T, M], ForwardBatch, LayerCache) to ([T, M], LayerCache). Weights and the products with
    them are in `dtype`; what flows from layer to layer is in `hidden_dtype`.
    """

    def __init__(
        self, config: ModelConfig, layers: Sequence[nnx.Module], dtype: jnp.dtype, hidden_dtype: jnp.dtype
    ) -> None:
        self.frame = Frame(config, dtype, hidden_dtype)
        self.layers = nnx.List(layers)
