"""The quantized product on TPUs: a Mosaic kernel over tiles of tokens, outputs and inputs.

Weights travel from HBM as they are stored and are widened in VMEM. Knows nothing of other backends.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantized_matmul.quantize import quantize_rows

_LANES = 128
_MAX_TOKENS = 256  # a tile
_MAX_INPUTS = 2048
_MAX_GROUPS = 8  # of inputs; each is a product of its own
_WEIGHT_TILE_BYTES = 2 << 20  # large enough to hide what a step costs, small enough for two of them in any VMEM
_SUM_TILE_BYTES = 4 << 20


class Tile(NamedTuple):
    """Sizes of one step of the grid."""

    tokens: int
    outputs: int
    inputs: int


# Traced and lowered once for all layers that are alike.
@functools.partial(jax.jit, static_argnames=("quantize_activations", "interpret"))
def quantized_matmul_tpu(
    x: jax.Array,  # [T, I]
    weight: jax.Array,  # [O, I]
    scales: jax.Array,  # [G, O]
    *,
    quantize_activations: bool,
    interpret: Any = False,
) -> jax.Array:
    """See pallas_kernels.quantized_matmul.quantized_matmul. Returns [T, O] in x's dtype.

    interpret is what pallas_call takes, for tests. Static.
    """
    (num_tokens, num_inputs), num_outputs, dtype = x.shape, len(weight), x.dtype
    row_scales = jnp.ones((num_tokens, 1), jnp.float32)
    if quantize_activations:
        x, row_scales = quantize_rows(x)
        if not _multiplies_int8(interpret):
            x = x.astype(jnp.bfloat16)
    tile = choose_tile(num_tokens, num_outputs, num_inputs, num_inputs // len(scales), weight.dtype)
    grid = (pl.cdiv(num_tokens, tile.tokens), pl.cdiv(num_outputs, tile.outputs), num_inputs // tile.inputs)
    groups = max(len(scales) * tile.inputs // num_inputs, 1)  # of inputs in a tile
    sum_dtype = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    return pl.pallas_call(
        functools.partial(_kernel, is_grouped=len(scales) > 1),
        grid=grid,
        in_specs=[
            pl.BlockSpec((tile.tokens, tile.inputs), lambda t, o, i: (t, i)),
            pl.BlockSpec((tile.outputs, tile.inputs), lambda t, o, i: (o, i)),
            pl.BlockSpec((tile.tokens, 1), lambda t, o, i: (t, 0)),
            pl.BlockSpec((groups, 1, tile.outputs), lambda t, o, i: (i if len(scales) > 1 else 0, 0, o)),
        ],
        out_specs=pl.BlockSpec((tile.tokens, tile.outputs), lambda t, o, i: (t, o)),
        out_shape=jax.ShapeDtypeStruct((num_tokens, num_outputs), dtype),
        scratch_shapes=[pltpu.VMEM((tile.tokens, tile.outputs), sum_dtype)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_tokens * num_outputs * num_inputs,
            bytes_accessed=weight.size * weight.dtype.itemsize + x.nbytes + num_tokens * num_outputs * dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="quantized_matmul",
    )(x, weight, row_scales, scales[:, None])


def _multiplies_int8(interpret: Any) -> bool:
    """Whether the chip's matrix unit takes int8: TPU7x's doesn't."""
    return bool(interpret) or pltpu.get_tpu_info().int8_ops_per_second > 0


def choose_tile(num_tokens: int, num_outputs: int, num_inputs: int, group_size: int, dtype: jnp.dtype) -> Tile:
    """Chooses sizes that the hardware can tile. What is left over of tokens and outputs is never written."""
    tokens = min(num_tokens, _MAX_TOKENS)
    unit, limit = _LANES, _MAX_INPUTS
    if group_size < num_inputs:
        unit = math.lcm(group_size, _LANES)
        limit = max(unit, min(limit, _MAX_GROUPS * group_size))
    inputs = max((size for size in range(unit, limit + 1, unit) if num_inputs % size == 0), default=num_inputs)
    bits = 4 if dtype == jnp.int4 else 8
    outputs = min(_WEIGHT_TILE_BYTES * 8 // bits // inputs, _SUM_TILE_BYTES // 4 // tokens)
    outputs = max(outputs // _LANES, 1) * _LANES
    return Tile(tokens, min(outputs, num_outputs), inputs)


def _kernel(
    x_ref: Any,  # [tokens, inputs]
    weight_ref: Any,  # [outputs, inputs]
    row_scales_ref: Any,  # [tokens, 1]
    scales_ref: Any,  # [groups, 1, outputs]
    out_ref: Any,  # [tokens, outputs]
    sum_ref: Any,  # [tokens, outputs]
    *,
    is_grouped: bool,
) -> None:
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _clear() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    num_groups = scales_ref.shape[0] if is_grouped else 1
    size = x_ref.shape[1] // num_groups
    for group in range(num_groups):
        part = slice(group * size, (group + 1) * size)
        product = _dot(x_ref[:, part], weight_ref[:, part], sum_ref.dtype)
        sum_ref[...] += product * scales_ref[group] if is_grouped else product

    @pl.when(step == pl.num_programs(2) - 1)
    def _finish() -> None:
        out = sum_ref[...].astype(jnp.float32) * row_scales_ref[...]
        out_ref[...] = (out if is_grouped else out * scales_ref[0]).astype(out_ref.dtype)


def _dot(x: jax.Array, weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Multiplies x: [T, I] and weight: [O, I], widened to x's dtype."""
    return jax.lax.dot_general(
        x,
        weight.astype(x.dtype),
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=dtype,
    )
