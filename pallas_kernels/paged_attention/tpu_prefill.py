"""Attention of several queries a sequence on TPUs: a tile of queries against a tile of keys and values.

One KV head after another. Its rows are the tile's queries times the heads of its group, taken _row_block at a time. The
products of one block with the keys are computed beside the softmax of the block before.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.flash import HIDDEN, LOWEST, cap_scores, flash_step, is_visible, query_scale, widen
from pallas_kernels.paged_attention.kv_layout import LANES
from pallas_kernels.paged_attention.tpu_config import TpuConfig
from pallas_kernels.paged_attention.tpu_pipeline import Compute, Tile
from pallas_kernels.paged_attention.tpu_tile import clear_tail, load_keys, load_values, multiply

_MAX_ROW_BLOCK = 256


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
            scaled = q[:, head].astype(jnp.float32) * query_scale(config.scale, config.logit_soft_cap)
            queries[head] = scaled.reshape(num_rows, config.width).astype(config.compute_dtype)
            if sinks is not None:
                spread = jnp.broadcast_to(sinks[head][None], (config.query_tile, config.group, LANES))
                maximum[head] = spread.reshape(num_rows, LANES)
        if sinks is None:
            maximum[...] = jnp.full_like(maximum, LOWEST)
        total[...] = jnp.full_like(total, 0.0 if sinks is None else 1.0 / LANES)
        weighted[...] = jnp.zeros_like(weighted)

    def compute(tile: Tile, kv: Any) -> None:
        clear_tail(config, kv, tile.num_keys)

        def part(index: jax.Array, _: None) -> None:
            first_key = tile.first_key + index * config.compute_tokens
            is_whole = first_key + config.compute_tokens - 1 <= tile.first_query
            if config.sliding_window is not None:
                is_whole &= first_key > tile.first_query + config.query_tile - 1 - config.sliding_window
            for masked in (True, False):  # most parts are seen by every query: no masks there

                @pl.when(is_whole != masked)
                def _(masked: bool = masked) -> None:
                    mask = (first_key, tile.first_query) if masked else None
                    jax.lax.fori_loop(0, config.num_kv_heads, lambda head, _: one_head(kv, index, head, mask), None)

        num_parts = (tile.num_keys + config.compute_tokens - 1) // config.compute_tokens
        jax.lax.fori_loop(0, num_parts, part, None)

    def one_head(kv: Any, index: jax.Array, head: jax.Array, mask: tuple[jax.Array, jax.Array] | None) -> None:
        keys, values = load_keys(config, kv, index, head), load_values(config, kv, index, head)
        blocks = [slice(first, first + row_block) for first in range(0, num_rows, row_block)]
        ahead = multiply(config, queries[head, blocks[0]], keys, transpose=True)
        for number, rows in enumerate(blocks):
            products = ahead
            if number + 1 < len(blocks):  # the matrix unit goes on while this block's softmax is computed
                ahead = multiply(config, queries[head, blocks[number + 1]], keys, transpose=True)
            scores = cap_scores(products, config.logit_soft_cap)
            if mask is not None:
                scores = jnp.where(_visible(config, rows, *mask), scores, HIDDEN)
            step = flash_step(scores, maximum[head, rows], total[head, rows])
            shrunk = weighted[head, rows] * widen(step.shrink, config.width)
            weighted[head, rows] = shrunk + multiply(config, step.weights.astype(config.compute_dtype), values)
            maximum[head, rows], total[head, rows] = step.maximum, step.total

    def finish(out: jax.Array) -> None:
        for head in range(config.num_kv_heads):
            result = weighted[head] * (config.v_scale / jnp.sum(total[head], axis=1, keepdims=True))
            out[:, head] = result.astype(out.dtype).reshape(config.query_tile, config.group, config.width)

    return Compute(start, compute, finish)


def _visible(config: TpuConfig, rows: slice, first_key: jax.Array, first_query: jax.Array) -> jax.Array:
    """Returns which keys of a part these rows of a tile see: [R, compute_tokens]."""
    num_rows = rows.stop - rows.start
    row = rows.start + jax.lax.broadcasted_iota(jnp.int32, (num_rows, LANES), 0)
    position = widen(first_query + _divide(row, config.group), config.compute_tokens)
    keys = first_key + jax.lax.broadcasted_iota(jnp.int32, (num_rows, config.compute_tokens), 1)
    return is_visible(keys, position, config.sliding_window)


def _row_block(num_rows: int) -> int:
    """Returns the largest divisor of num_rows that is a multiple of 16 and at most _MAX_ROW_BLOCK."""
    return max(size for size in range(16, _MAX_ROW_BLOCK + 1, 16) if num_rows % size == 0)


def _divide(dividend: jax.Array, divisor: int) -> jax.Array:
    """Returns small positive integers divided by a constant; a shift where that does."""
    if divisor & (divisor - 1) == 0:
        return jax.lax.shift_right_logical(dividend, divisor.bit_length() - 1)
    return jax.lax.div(dividend, divisor)
