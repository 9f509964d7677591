"""The quantized product on NVIDIA GPUs from Ampere on: a Pallas kernel lowered through Triton.

A program of the grid takes a tile of tokens and outputs. Where there are few such tiles, several programs share the
inputs of one, and their sums are added afterwards. Knows nothing of other backends.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.quantized_matmul.quantize import quantize_rows

_WANTED_PROGRAMS = 256  # enough to give every multiprocessor of the largest GPU two
_MIN_SPLIT_INPUTS = 512
_MIN_INPUTS = 32  # that a product of int8 sums


class Tiling(NamedTuple):
    """One kernel's sizes, powers of two but for num_splits. Static."""

    tokens: int
    outputs: int
    inputs: int  # a step
    num_splits: int
    num_warps: int
    num_stages: int


def quantized_matmul_triton(
    x: jax.Array,  # [T, I]
    weight: jax.Array,  # [O, I]
    scales: jax.Array,  # [G, O]
    *,
    quantize_activations: bool,
    interpret: bool = False,
) -> jax.Array:
    """See pallas_kernels.quantized_matmul.quantized_matmul. Returns [T, O] in x's dtype, or float32.

    interpret runs the kernel in Pallas's interpreter on any machine, for tests. Static.
    """
    num_tokens, num_outputs, dtype = len(x), len(weight), x.dtype
    row_scales = jnp.ones((num_tokens, 1), jnp.float32)
    if quantize_activations:
        x, row_scales = quantize_rows(x)
    tiling = choose_tiling(num_tokens, num_outputs, x.shape[1], x.shape[1] // len(scales))
    sums = jax.ShapeDtypeStruct((tiling.num_splits, num_tokens, num_outputs), jnp.float32)
    out = pl.pallas_call(
        functools.partial(_kernel, tiling=tiling),
        grid=(pl.cdiv(num_outputs, tiling.outputs), pl.cdiv(num_tokens, tiling.tokens), tiling.num_splits),
        out_shape=sums if tiling.num_splits > 1 else jax.ShapeDtypeStruct((1, num_tokens, num_outputs), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name="quantized_matmul",
    )(*(array.reshape(len(array), -1, tiling.inputs) for array in (x, weight)), row_scales, scales)
    return out[0] if tiling.num_splits == 1 else jnp.sum(out, axis=0)


def choose_tiling(num_tokens: int, num_outputs: int, num_inputs: int, group_size: int) -> Tiling:
    """Chooses sizes. A step's inputs lie in one group, and steps fill it."""
    tokens = min(max(_pow2_ceil(num_tokens), 16), 128)
    outputs = 128 if tokens > 64 else 64
    inputs = min(group_size & -group_size, 128)
    if inputs < _MIN_INPUTS:
        raise ValueError(f"inputs, and those of a group, must be a multiple of {_MIN_INPUTS}, got {group_size}")
    programs = pl.cdiv(num_tokens, tokens) * pl.cdiv(num_outputs, outputs)
    num_splits = max(min(pl.cdiv(_WANTED_PROGRAMS, programs), num_inputs // _MIN_SPLIT_INPUTS), 1)
    return Tiling(tokens, outputs, inputs, num_splits, num_warps=8 if tokens > 64 else 4, num_stages=3)


def _pow2_ceil(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _kernel(
    x_ref: Any,  # [T, steps, I / steps]
    weight_ref: Any,  # [O, steps, I / steps]
    row_scales_ref: Any,  # [T, 1]
    scales_ref: Any,  # [G, O]
    out_ref: Any,  # [splits, T, O]
    *,
    tiling: Tiling,
) -> None:
    num_tokens, num_steps, _ = x_ref.shape
    num_groups, num_outputs = scales_ref.shape
    tokens = pl.ds(pl.program_id(1) * tiling.tokens, tiling.tokens)
    outputs = pl.ds(pl.program_id(0) * tiling.outputs, tiling.outputs)
    is_token = (tokens.start + lax.broadcasted_iota(jnp.int32, (tiling.tokens, 1), 0)) < num_tokens
    is_row = (outputs.start + lax.broadcasted_iota(jnp.int32, (tiling.outputs, 1), 0)) < num_outputs
    is_output = (outputs.start + lax.broadcasted_iota(jnp.int32, (1, tiling.outputs), 1)) < num_outputs

    def step(index: jax.Array, total: jax.Array) -> jax.Array:
        x = plgpu.load(x_ref.at[tokens, index, :], mask=is_token, other=0)
        weight = plgpu.load(weight_ref.at[outputs, index, :], mask=is_row, other=0)
        product = _dot(x, weight.astype(x.dtype), total.dtype)
        if num_groups > 1:
            group = lax.div(index, jnp.int32(num_steps // num_groups))
            product *= plgpu.load(scales_ref.at[pl.ds(group, 1), outputs], mask=is_output, other=0)
        return total + product

    steps_per_split = pl.cdiv(num_steps, tiling.num_splits)
    start = pl.program_id(2) * steps_per_split
    total = jnp.zeros((tiling.tokens, tiling.outputs), jnp.int32 if x_ref.dtype == jnp.int8 else jnp.float32)
    total = lax.fori_loop(start, jnp.minimum(start + steps_per_split, num_steps), step, total)
    out = total.astype(jnp.float32) * plgpu.load(row_scales_ref.at[tokens, :], mask=is_token, other=0)
    if num_groups == 1:
        out *= plgpu.load(scales_ref.at[:, outputs], mask=is_output, other=0)
    place = out_ref.at[pl.program_id(2), tokens, outputs]
    plgpu.store(place, out.astype(out_ref.dtype), mask=is_token & is_output)


def _dot(x: jax.Array, weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Multiplies x: [T, I] and weight: [O, I]."""
    return lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=dtype,
    )
