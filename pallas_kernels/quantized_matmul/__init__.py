"""Products of activations with int8, int4 or fp8 weights."""

from importlib import import_module

import jax
import jax.numpy as jnp

from pallas_kernels.backends import choose_backend
from pallas_kernels.quantized_matmul.quantize import FP8, quantize_rows, quantize_weight

__all__ = ["FP8", "quantize_rows", "quantize_weight", "quantized_matmul"]


def quantized_matmul(
    x: jax.Array,
    weight: jax.Array,
    scales: jax.Array,
    *,
    quantize_activations: bool = False,
    backend: str | None = None,
) -> jax.Array:
    """Computes x @ (weight * scales).T for a weight as quantize_weight makes it.

    Two schemes. Weight-only: the numbers are widened to x's dtype on their way into the product, which saves memory
    and its traffic. With quantize_activations each token becomes int8 as well and products are int8 x int8 -> int32:
    faster where the hardware has them (CPUs, TPU v5e, v5p and v6e, NVIDIA GPUs), at the price of the activations'
    rounding. TPU7x has none; there the same int8 numbers are multiplied as bfloat16, which holds them exactly, so that
    results agree but nothing is gained: use weight-only on it.

    fp8 is float8_e4m3fn; XLA makes the product whatever the backend is: of fp8 where the chip has that (TPU v6e and
    TPU7x, NVIDIA from Ada on), on CPU of both widened to float32.

    Args:
      x: [T, I] float32 or bfloat16.
      weight: [O, I] int8, int4 or float8_e4m3fn.
      scales: [G, O] float32; each spans I / G inputs, in order.
      quantize_activations: For int8 and fp8 weights with G = 1. Static.
      backend: One of pallas_kernels.BACKENDS; None chooses, see pallas_kernels.backends. Static.

    Returns:
      [T, O] in x's dtype, summed in int32 or float32.

    Raises:
      ValueError: The shapes or dtypes don't fit.
    """
    _check(x, weight, scales, quantize_activations)
    name = choose_backend(backend)
    if weight.dtype == FP8 and name != "reference":
        name = "xla"
    function = getattr(import_module(f"pallas_kernels.quantized_matmul.{name}"), f"quantized_matmul_{name}")
    return function(x, weight, scales, quantize_activations=quantize_activations).astype(x.dtype)


def _check(x: jax.Array, weight: jax.Array, scales: jax.Array, quantize_activations: bool) -> None:
    if weight.dtype not in (jnp.int8, jnp.int4, FP8):
        raise ValueError(f"weight must be int8, int4 or {FP8.name}, got {weight.dtype}")
    num_groups, num_outputs = scales.shape
    if x.shape[1] != weight.shape[1] or num_outputs != weight.shape[0] or weight.shape[1] % num_groups:
        raise ValueError(f"x {x.shape}, weight {weight.shape} and scales {scales.shape} don't fit")
    if quantize_activations and (num_groups > 1 or weight.dtype == jnp.int4):
        raise ValueError(
            "quantize_activations needs an int8 or fp8 weight with one scale an output, "
            f"got {weight.dtype} with {num_groups}"
        )
