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
from pallas_kernels.paged_attention.tpu_rows import (
    load_rows,
    scratch_shape,
    spread_heads,
    stage_queries,
    store_rows,
    token_of_rows,
    unstage_results,
)
from pallas_kernels.paged_attention.tpu_tile import clear_tail, divide, load_keys, load_values, multiply

_MAX_ROW_BLOCK = 256
_MAX_UNITS = 8  # row blocks of KV heads whose code stands in one stretch, for the compiler to overlap


def scratch_shapes(config: TpuConfig) -> list[Any]:
    """Words of queries and results, queries, running maximum, running sum, weighted sum."""
    rows = (config.num_kv_heads, config.query_tile * config.group)
    return [
        scratch_shape(config),
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
    words: Any,
    queries: jax.Array,
    maximum: jax.Array,
    total: jax.Array,
    weighted: jax.Array,
) -> Compute:
    """Returns the attention on these refs, which are scratch_shapes'."""
    num_rows = config.query_tile * config.group
    row_block = _row_block(num_rows)
    num_groups = config.num_kv_heads // heads_at_a_time(config)

    def start(q: jax.Array) -> None:
        stage_queries(config, q, words)
        for head in range(config.num_kv_heads):
            scaled = load_rows(config, q, words, head) * query_scale(config.scale, config.logit_soft_cap)
            queries[head] = scaled.astype(config.compute_dtype)
            if sinks is not None:
                maximum[head] = spread_heads(config, sinks[head])
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
                    jax.lax.fori_loop(0, num_groups, lambda group, _: some_heads(kv, index, group, mask), None)

        num_parts = (tile.num_keys + config.compute_tokens - 1) // config.compute_tokens
        jax.lax.fori_loop(0, num_parts, part, None)

    def some_heads(kv: Any, index: jax.Array, group: jax.Array, mask: tuple[jax.Array, jax.Array] | None) -> None:
        """Computes heads_at_a_time KV heads against a part of the tile."""
        at_a_time = config.num_kv_heads // num_groups
        heads = [group * at_a_time + number for number in range(at_a_time)]
        units = [(head, slice(first, first + row_block)) for head in heads for first in range(0, num_rows, row_block)]
        ahead = multiply_keys(kv, index, *units[0])
        for (head, rows), following in zip(units, [*units[1:], None], strict=True):
            products = ahead
            if following is not None:  # the matrix unit goes on while this unit's softmax is computed
                ahead = multiply_keys(kv, index, *following)
            scores = cap_scores(products, config.logit_soft_cap)
            if mask is not None:
                scores = jnp.where(_visible(config, rows, *mask), scores, HIDDEN)
            step = flash_step(scores, maximum[head, rows], total[head, rows])
            weights, values = step.weights.astype(config.compute_dtype), load_values(config, kv, index, head)
            shrunk = weighted[head, rows] * widen(step.shrink, config.width)
            weighted[head, rows] = shrunk + multiply(config, weights, values)
            maximum[head, rows], total[head, rows] = step.maximum, step.total

    def multiply_keys(kv: Any, index: jax.Array, head: jax.Array, rows: slice) -> jax.Array:
        return multiply(config, queries[head, rows], load_keys(config, kv, index, head), transpose=True)

    def finish(out: jax.Array) -> None:
        for head in range(config.num_kv_heads):
            result = divide(weighted[head], total[head], config.v_scale)
            store_rows(config, out, words, head, result)
        unstage_results(config, out, words)

    return Compute(start, compute, finish)


def _visible(config: TpuConfig, rows: slice, first_key: jax.Array, first_query: jax.Array) -> jax.Array:
    """Returns which keys of a part these rows of a tile see: [R, compute_tokens]."""
    position = widen(first_query + token_of_rows(config, rows, LANES), config.compute_tokens)
    keys = first_key + jax.lax.broadcasted_iota(jnp.int32, position.shape, 1)
    return is_visible(keys, position, config.sliding_window)


def _row_block(num_rows: int) -> int:
    """Returns the largest divisor of num_rows that is a multiple of 16 and at most _MAX_ROW_BLOCK."""
    return max(size for size in range(16, _MAX_ROW_BLOCK + 1, 16) if num_rows % size == 0)


def heads_at_a_time(config: TpuConfig) -> int:
    """Returns the largest divisor of K with at most _MAX_UNITS units, or 1."""
    num_rows = config.query_tile * config.group
    limit = max(1, _MAX_UNITS // (num_rows // _row_block(num_rows)))
    return max(heads for heads in range(1, limit + 1) if config.num_kv_heads % heads == 0)
