"""Feed-forward blocks."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.layers.linear import Linear
from sharding.rules import SplitAxis
from sharding.split import Even

_TANH_GELU = partial(jax.nn.gelu, approximate=True)
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "relu": jax.nn.relu,
}


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)). Gate and up are one matrix, gate first."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, dtype: jnp.dtype, *, has_bias: bool = False
    ) -> None:
        self.activation = activation
        both = SplitAxis("mlp", (Even(intermediate_size), Even(intermediate_size)))
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, axes=(both, "embed"), has_bias=has_bias, dtype=dtype)
        self.down = Linear(intermediate_size, hidden_size, axes=("embed", "mlp"), has_bias=has_bias, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x: [T, M] to [T, M]."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)  # [T, F] each
        return self.down(ACTIVATIONS[self.activation](gate) * up)


class MLP(nnx.Module):
    """down(activation(up(x)))."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, dtype: jnp.dtype, *, has_bias: bool = False
    ) -> None:
        self.activation = activation
        self.up = Linear(hidden_size, intermediate_size, axes=("mlp", "embed"), has_bias=has_bias, dtype=dtype)
        self.down = Linear(intermediate_size, hidden_size, axes=("embed", "mlp"), has_bias=has_bias, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x: [T, M] to [T, M]."""
        return self.down(ACTIVATIONS[self.activation](self.up(x)))
