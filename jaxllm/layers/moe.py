"""A mixture of experts in place of the MLP: each token goes through the few experts that its router chose."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.layers.mlp import ACTIVATIONS, GatedMLP
from jaxllm.layers.parameter import parameter, quantized
from jaxllm.layers.router import SigmoidRouter, SoftmaxRouter
from jaxllm.quantization import Scheme
from pallas_kernels.grouped_matmul import grouped_matmul
from sharding.collectives import num_shards, shard_index, sum_over


@dataclass(frozen=True)
class Gated:
    """activation(gate) * up."""

    activation: str

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return ACTIVATIONS[self.activation](gate) * up


@dataclass(frozen=True)
class ClampedGated:
    """gpt-oss's: both bounded by `limit`, gate * sigmoid(alpha * gate) * (up + 1)."""

    alpha: float
    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


class Experts(nnx.Module):
    """E gated MLPs. Their matrices are stored as [in, out], gate first. Devices share the experts."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        combine: Callable[[jax.Array, jax.Array], jax.Array],
        dtype: jnp.dtype,
        *,
        has_bias: bool = False,
    ) -> None:
        self.combine, self.dtype = combine, dtype
        inner = 2 * intermediate_size
        self.gate_up = parameter((num_experts, hidden_size, inner), ("experts", "embed", None), dtype)
        self.down = parameter((num_experts, intermediate_size, hidden_size), ("experts", None, "embed"), dtype)
        self.gate_up_bias = parameter((num_experts, inner), ("experts", None), dtype) if has_bias else None
        self.down_bias = parameter((num_experts, hidden_size), ("experts", "embed"), dtype) if has_bias else None
        self.scheme: Scheme | None = None

    def quantize(self, scheme: Scheme) -> None:
        """Declares the matrices as numbers and scales. Products are with the numbers widened, whatever the scheme."""
        scheme = scheme.of_experts()
        self.gate_up, gate_up_scales = quantized(self.gate_up, scheme)
        self.down, down_scales = quantized(self.down, scheme)
        self.gate_up_scale, self.down_scale = nnx.data(gate_up_scales), nnx.data(down_scales)
        self.scheme = scheme

    def on_this_device(self, experts: jax.Array) -> jax.Array:
        """Counts experts: [R] int32 from the first one of this device; those of other devices come past the last."""
        if num_shards("experts") == 1:
            return experts
        num_mine = self.down[...].shape[0]
        mine = experts - shard_index("experts") * num_mine
        return jnp.where((mine >= 0) & (mine < num_mine), mine, num_mine)

    def __call__(self, rows: jax.Array, experts: jax.Array) -> jax.Array:
        """Maps rows: [R, M], sorted by their experts: [R] int32, counted on this device, to [R, M].

        Rows whose expert is on another device become zeros.
        """
        num_mine = self.down[...].shape[0]
        group_sizes = jnp.bincount(experts, length=num_mine).astype(jnp.int32)  # [E]
        gate_up, down = self._matrices()
        inner = grouped_matmul(rows, gate_up, group_sizes)  # [R, 2F]
        if self.gate_up_bias is not None:
            inner = inner + self.gate_up_bias[...][experts]
        out = grouped_matmul(self.combine(*jnp.split(inner, 2, axis=-1)), down, group_sizes)
        if self.down_bias is not None:
            out = out + self.down_bias[...][experts]
        return out if num_shards("experts") == 1 else jnp.where((experts < num_mine)[:, None], out, 0)

    def _matrices(self) -> tuple[jax.Array, jax.Array]:
        """Returns gate_up: [E, M, 2F] and down: [E, F, M] as floats."""
        if self.scheme is None:
            return self.gate_up[...], self.down[...]
        gate_up = _widened(self.gate_up[...], self.gate_up_scale[...], self.dtype)
        return gate_up, _widened(self.down[...], self.down_scale[...], self.dtype)


def _widened(values: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns values: [E, I, O] times their groups' scales: [E, G, O]."""
    grouped = values.astype(jnp.float32).reshape(*scales.shape[:2], -1, scales.shape[2])  # [E, G, I / G, O]
    return (grouped * scales[:, :, None]).astype(dtype).reshape(values.shape)


class MoE(nnx.Module):
    """The weighted sum of a token's experts, and the shared expert if there is one.

    Args:
      router: Chooses the experts of each token.
      experts: All of them.
      shared: An MLP that every token goes through, or None.
    """

    def __init__(self, router: SoftmaxRouter | SigmoidRouter, experts: Experts, shared: GatedMLP | None = None) -> None:
        self.router, self.experts, self.shared = router, experts, shared

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x: [T, M] to [T, M]."""
        weights, ids = self.router(x)  # [T, k] each
        num_tokens, num_chosen = ids.shape
        flat = self.experts.on_this_device(ids.reshape(-1))  # [T * k]
        order = jnp.argsort(flat)
        out = self.experts(x[order // num_chosen], flat[order])  # [T * k, M], by expert
        by_token = out[jnp.argsort(order)].reshape(num_tokens, num_chosen, -1)  # [T, k, M]
        mixed = jnp.einsum("tk,tkm->tm", weights, by_token.astype(jnp.float32)).astype(x.dtype)
        mixed = sum_over(mixed, "experts")
        return mixed if self.shared is None else mixed + self.shared(x)
