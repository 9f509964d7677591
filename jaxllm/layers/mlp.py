"""Feed-forward blocks."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.layers.linear import Linear


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)). Gate and up are one matrix, gate first."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, has_bias: bool, dtype: jnp.dtype) -> None:
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, axes=("mlp", "embed"), has_bias=has_bias, dtype=dtype)
        self.down = Linear(intermediate_size, hidden_size, axes=("embed", "mlp"), has_bias=has_bias, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x: [T, M] to [T, M]."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)  # [T, F] each
        return self.down(jax.nn.silu(gate) * up)
