"""A decoder: embedding, layers, norm, logits. Families bring what they do otherwise; registry.py lists them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.layers.embedding import Embedding, LearnedPositions
from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import Norm, RMSNorm
from jaxllm.models.weight_map import Weight, frame_weights


class Frame(nnx.Module):
    """What stands around the layers: the embedding before them, the norm and the logits after them.

    Args:
      config: Sizes.
      dtype: Of the weights.
      hidden_dtype: Of what flows from layer to layer.
      norm: The last norm; None where the layers end with one.
      positions: What is added for each token's position, or None.
      embed_size: Width of the embedding where it isn't M: it is then projected in, and out before the logits.
      embed_scale: Multiplies the embedding. Static, as is what follows.
      logits_scale: Multiplies the logits.
      logits_soft_cap: Bound of the logits, or None.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        hidden_dtype: jnp.dtype,
        *,
        norm: Norm | None,
        positions: LearnedPositions | None = None,
        embed_size: int | None = None,
        embed_scale: float = 1.0,
        logits_scale: float = 1.0,
        logits_soft_cap: float | None = None,
    ) -> None:
        self.hidden_dtype = hidden_dtype
        self.embed_scale, self.logits_scale, self.logits_soft_cap = embed_scale, logits_scale, logits_soft_cap
        hidden_size = config.hidden_size
        embed_size = embed_size or hidden_size
        self.embed = Embedding(config.vocab_size, embed_size, dtype)
        self.positions = positions
        has_projections = embed_size != hidden_size
        axes = ("embed", "embed_in")
        self.project_in = (
            Linear(embed_size, hidden_size, axes=axes, has_bias=False, dtype=dtype) if has_projections else None
        )
        self.project_out = (
            Linear(hidden_size, embed_size, axes=axes, has_bias=False, dtype=dtype) if has_projections else None
        )
        self.norm = norm
        self.lm_head = None if config.tie_word_embeddings else Embedding(config.vocab_size, embed_size, dtype)

    @property
    def parts_of_hidden(self) -> tuple[str, ...]:
        """Attributes whose weights `hidden` needs."""
        return ("embed", "positions", "project_in")

    @property
    def parts_of_logits(self) -> tuple[str, ...]:
        """Attributes whose weights `logits` needs."""
        return ("norm", "project_out", "embed" if self.lm_head is None else "lm_head")

    def hidden(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Maps token_ids and positions, both [T], to the first layer's input [T, M] in hidden_dtype."""
        with jax.named_scope("embed"):
            x = self.embed(token_ids).astype(self.hidden_dtype)
            if self.embed_scale != 1.0:
                x = x * self.embed_scale
            if self.project_in is not None:
                x = self.project_in(x)
            return x if self.positions is None else x + self.positions(positions).astype(x.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Maps the last layer's output [R, M] to float32 logits [R, V]."""
        with jax.named_scope("logits"):
            x = hidden if self.norm is None else self.norm(hidden)
            if self.project_out is not None:
                x = self.project_out(x)
            logits = (self.lm_head or self.embed).logits(x)
            if self.logits_scale != 1.0:
                logits = logits * self.logits_scale
            if self.logits_soft_cap is not None:
                logits = self.logits_soft_cap * jnp.tanh(logits / self.logits_soft_cap)
            return logits


class CausalLM(nnx.Module):
    """The frame and the layers. Build it under nnx.eval_shape; the loader brings the weights.

    Each layer maps (x: [T, M], ForwardBatch, LayerCache) to ([T, M], LayerCache). Products with weights are in the
    weights' dtype; what flows from layer to layer is in the frame's hidden_dtype. Layers whose static attributes are
    equal share their compiled program (worker/step_fn.py), so a family keeps a layer's index out of them.
    """

    def __init__(self, frame: Frame, layers: Sequence[nnx.Module]) -> None:
        self.frame = frame
        self.layers = nnx.List(layers)


def build_frame(config: ModelConfig, dtype: jnp.dtype, hidden_dtype: jnp.dtype) -> Frame:
    """Declares the frame of most families."""
    return Frame(config, dtype, hidden_dtype, norm=RMSNorm(config.hidden_size, config.rms_norm_eps))


def is_ignored(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is one of the rotation, stored, which the config says too."""
    return name.endswith(".rotary_emb.inv_freq")


class ModelPart(NamedTuple):
    """What a pipeline stage holds of a model."""

    layers: range
    has_hidden: bool  # the frame's weights before the layers
    has_logits: bool  # those after them

    def holds(self, frame: Frame, attribute: str) -> bool:
        """Whether the frame's weights under this attribute are among it."""
        return (self.has_hidden and attribute in frame.parts_of_hidden) or (
            self.has_logits and attribute in frame.parts_of_logits
        )


def model_parts(num_layers: int, num_stages: int) -> tuple[ModelPart, ...]:
    """Deals the layers to the stages, as evenly as can be. The last one has the logits too, and no layer more.

    >>> [part.layers for part in model_parts(num_layers=7, num_stages=3)]
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    ends = [-(-num_layers * (index + 1) // num_stages) for index in range(num_stages)]
    starts = [0, *ends[:-1]]
    return tuple(
        ModelPart(range(start, end), start == 0, end == num_layers) for start, end in zip(starts, ends, strict=True)
    )


class Family(NamedTuple):
    """What a family file offers, as FAMILY.

    Attributes:
      build_layer: (config, index, dtype of the weights) -> the layer, declared.
      layer_weights: (config, index) -> the layer's weights, by parameter path within it.
      build_frame: (config, dtype of the weights, hidden_dtype) -> the frame, declared.
      frame_weights: config -> the frame's weights, by parameter path in CausalLM.
      prefix: Begins the checkpoint's names; some checkpoints leave it out.
      is_ignored: (config, name) -> whether some checkpoints carry this tensor although nothing needs it.
    """

    build_layer: Callable[[ModelConfig, int, jnp.dtype], nnx.Module]
    layer_weights: Callable[[ModelConfig, int], dict[str, Weight]]
    build_frame: Callable[[ModelConfig, jnp.dtype, jnp.dtype], Frame] = build_frame
    frame_weights: Callable[[ModelConfig], dict[str, Weight]] = frame_weights
    prefix: str = "model."
    is_ignored: Callable[[ModelConfig, str], bool] = is_ignored
