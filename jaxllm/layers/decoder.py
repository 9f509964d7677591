"""The layers of a decoder, by where their norms stand. What attends and what follows it are given.

Each maps (x: [T, M], ForwardBatch, LayerCache) to ([T, M], LayerCache): the layer's cache comes back with this
step's tokens in it.
"""

import jax
from flax import nnx

from jaxllm.layers.attention import LayerCache
from jaxllm.layers.forward_batch import ForwardBatch
from jaxllm.layers.norm import Norm


class PreNormLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
      attention_norm: The first norm.
      attention: Maps as the layer does.
      mlp_norm: The second norm.
      mlp: Maps [T, M] to [T, M].
      residual_scale: Multiplies both terms that are added. Static.
    """

    def __init__(
        self, attention_norm: Norm, attention: nnx.Module, mlp_norm: Norm, mlp: nnx.Module, residual_scale: float = 1.0
    ) -> None:
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.residual_scale = residual_scale

    def __call__(self, x: jax.Array, batch: ForwardBatch, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        attended, cache = self.attention(self.attention_norm(x), batch, cache)
        x = x + self._scaled(attended)
        return x + self._scaled(self.mlp(self.mlp_norm(x))), cache

    def _scaled(self, x: jax.Array) -> jax.Array:
        return x if self.residual_scale == 1.0 else x * self.residual_scale


class SandwichNormLayer(nnx.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))). See PreNormLayer."""

    def __init__(
        self,
        attention_norm: Norm,
        attention: nnx.Module,
        attention_out_norm: Norm,
        mlp_norm: Norm,
        mlp: nnx.Module,
        mlp_out_norm: Norm,
    ) -> None:
        self.attention_norm, self.attention, self.attention_out_norm = attention_norm, attention, attention_out_norm
        self.mlp_norm, self.mlp, self.mlp_out_norm = mlp_norm, mlp, mlp_out_norm

    def __call__(self, x: jax.Array, batch: ForwardBatch, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        attended, cache = self.attention(self.attention_norm(x), batch, cache)
        x = x + self.attention_out_norm(attended)
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x))), cache


class OutputNormLayer(nnx.Module):
    """x + norm(attention(x)), then x + norm(mlp(x)). See PreNormLayer."""

    def __init__(self, attention: nnx.Module, attention_out_norm: Norm, mlp: nnx.Module, mlp_out_norm: Norm) -> None:
        self.attention, self.attention_out_norm = attention, attention_out_norm
        self.mlp, self.mlp_out_norm = mlp, mlp_out_norm

    def __call__(self, x: jax.Array, batch: ForwardBatch, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        attended, cache = self.attention(x, batch, cache)
        x = x + self.attention_out_norm(attended)
        return x + self.mlp_out_norm(self.mlp(x)), cache


class PostNormLayer(nnx.Module):
    """norm(x + attention(x)), then norm(x + mlp(x)), as the first transformers had it. See PreNormLayer."""

    def __init__(self, attention: nnx.Module, attention_norm: Norm, mlp: nnx.Module, mlp_norm: Norm) -> None:
        self.attention, self.attention_norm = attention, attention_norm
        self.mlp, self.mlp_norm = mlp, mlp_norm

    def __call__(self, x: jax.Array, batch: ForwardBatch, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        attended, cache = self.attention(x, batch, cache)
        x = self.attention_norm(x + attended)
        return self.mlp_norm(x + self.mlp(x)), cache
