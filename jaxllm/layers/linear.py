"""Linear projections."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.layers.parameter import parameter


class Linear(nnx.Module):
    """x @ weight (+ bias), with weight: [in_features, out_features]."""

    def __init__(
        self, in_features: int, out_features: int, *, axes: tuple[str, str], has_bias: bool, dtype: jnp.dtype
    ) -> None:
        self.weight = parameter((in_features, out_features), axes, dtype)
        self.bias = parameter((out_features,), axes[1:], dtype) if has_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x: [T, in_features] to [T, out_features]."""
        out = x @ self.weight[...]
        return out if self.bias is None else out + self.bias[...]
