"""Attention of several queries a sequence on TPUs: a tile of queries against a tile of keys and values.

One KV head after another. Its rows are the tile's queries times the heads of its group, taken _row_block at a time.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.flash import HIDDEN, LOWEST, flash_step, is_visible, scale_scores, widen
from pallas_kernels.paged_attention.kv_layout import LANES
from pallas_kernels.paged_attention.tpu_config import TpuConfig
from pallas_kernels.paged_attention.tpu_pipeline import Compute, Tile
from pallas_kernels.paged_attention.tpu_tile import clear_tail, load_keys, load_values, multiply

_MAX_ROW_BLOCK = 128


def scratch_shapes(config: TpuConfig) -> list[Any]:
    """Queries, running maximum, running sum, weighted sum."""
    rows = (config.num_kv_heads, config.query_tile * config.group)
    return [
        pltpu.VMEM((*rows, config.width), config.compute_dtype),
        pltpu.VMEM((*rows, LANES), jnp.float32),
        pltpu.VMEM((*rows, LANES), jnp.float32),
        pltpu.VMEM((*rows, config.width), jnp.float32),
    ]


def spread_sinks(config: TpuConfig, sinks: jax.Array) -> jax.Array:
    """Returns sinks: [H] as the kernel reads them, [K, G, 128]."""
    shape = (config.num_kv_heads, config.group, LANES)
    return jnp.broadcast_to(sinks.reshape(shape[0], shape[1], 1), shape)


def make_compute(
    config: TpuConfig,
    sinks: jax.Array | None,
    queries: jax.Array,
    maximum: jax.Array,
    total: jax.Array,
    weighted: jax.Array,
) -> Compute:
    """Returns the attention on these refs, which are scratch_shapes'."""
    num_rows = config.query_tile * config.group
    row_block = _row_block(num_rows)

    def start(q: jax.Array) -> None:
        for head in range(config.num_kv_heads):
            queries[head] = q[:, head].reshape(num_rows, config.width).astype(config.compute_dtype)
            if sinks is not None:
                spread = jnp.broadcast_to(sinks[head][None], (config.query_tile, config.group, LANES))
                maximum[head] = spread.reshape(num_rows, LANES)
        if sinks is None:
            maximum[...] = jnp.full_like(maximum, LOWEST)
        total[...] = jnp.full_like(total, 0.0 if sinks is None else 1.0)
        weighted[...] = jnp.zeros_like(weighted)

    def compute(tile: Tile, kv: jax.Array) -> None:
        clear_tail(config, kv, tile.num_keys)

        def part(index: jax.Array, _: None) -> None:
            jax.lax.fori_loop(0, config.num_kv_heads, lambda head, _: one_head(index, head), None)

        def one_head(index: jax.Array, head: jax.Array) -> None:
            jax.lax.fori_loop(0, num_rows // row_block, lambda block, _: one_block(index, head, block), None)

        def one_block(index: jax.Array, head: jax.Array, block: jax.Array) -> None:
            rows = (head, pl.ds(pl.multiple_of(block * row_block, row_block), row_block))
            shape = (row_block, config.compute_tokens)
            keys = tile.first_key + index * config.compute_tokens + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
            row = block * row_block + jax.lax.broadcasted_iota(jnp.int32, (row_block, LANES), 0)
            position = widen(tile.first_query + _divide(row, config.group), config.compute_tokens)
            visible = is_visible(keys, position, config.sliding_window)
            products = multiply(config, queries[rows], load_keys(config, kv, index, head), transpose=True)
            scores = scale_scores(products, config.scale, config.logit_soft_cap)
            step = flash_step(jnp.where(visible, scores, HIDDEN), maximum[rows], total[rows])
            weights = step.weights.astype(config.compute_dtype)
            shrunk = weighted[rows] * widen(step.shrink, config.width)
            weighted[rows] = shrunk + multiply(config, weights, load_values(config, kv, index, head))
            maximum[rows], total[rows] = step.maximum, step.total

        num_parts = (tile.num_keys + config.compute_tokens - 1) // config.compute_tokens
        jax.lax.fori_loop(0, num_parts, part, None)

    def finish(out: jax.Array) -> None:
        for head in range(config.num_kv_heads):
            result = weighted[head] * (config.v_scale / widen(total[head], config.width))
            out[:, head] = result.astype(out.dtype).reshape(config.query_tile, config.group, config.width)

    return Compute(start, compute, finish)


def _row_block(num_rows: int) -> int:
    """Returns the largest divisor of num_rows that is a multiple of 16 and at most _MAX_ROW_BLOCK."""
    return max(size for size in range(16, _MAX_ROW_BLOCK + 1, 16) if num_rows % size == 0)


def _divide(dividend: jax.Array, divisor: int) -> jax.Array:
    """Returns small positive integers divided by a constant; a shift where that does."""
    if divisor & (divisor - 1) == 0:
        return jax.lax.shift_right_logical(dividend, divisor.bit_length() - 1)
    return jax.lax.div(dividend, divisor)
