"""Attention of several queries a sequence on TPUs: a tile of queries against a tile of keys and values.

One KV head after another. Its rows are the tile's queries times the heads of its group, taken _row_block at a time. The
products of one block with the keys are computed beside the softmax of the block before.

The weights are added up by the vector unit, or by the matrix unit with 128 columns of ones beside the values
(TileSizes.sums_by_products). Then all lanes of `total` are alike; else they add up to the sum.
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
    chunks,
    load_rows,
    scratch_shape,
    spread_heads,
    stage_queries,
    store_rows,
    token_of_rows,
    unstage_results,
)
from pallas_kernels.paged_attention.tpu_tile import Blocks, clear_tail, load_keys, load_values, multiply

_MASKED_ROW_BLOCK = 256  # at most: masks take registers


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
    row_block, masked_row_block = _row_block(config), _row_block(config, _MASKED_ROW_BLOCK)
    num_groups = config.num_kv_heads // heads_at_a_time(config)
    has_sums = _has_sums(config)
    first_total = 0.0 if sinks is None else 1.0 if has_sums else 1.0 / LANES

    def reset() -> None:
        for head in range(config.num_kv_heads):
            weighted[head] = jnp.zeros_like(weighted[head])
            reset_columns(head)

    def reset_columns(head: int) -> None:
        lowest = jnp.full_like(maximum[head], LOWEST)
        maximum[head] = lowest if sinks is None else spread_heads(config, sinks[head])
        total[head] = jnp.full_like(total[head], first_total)

    def start(q: jax.Array) -> None:
        stage_queries(config, q, words)
        for head in range(config.num_kv_heads):
            for chunk in chunks(config):
                loaded = load_rows(config, q, words, head, chunk)
                scaled = loaded * query_scale(config.scale, config.logit_soft_cap)
                queries[head, chunk] = scaled.astype(config.compute_dtype)

    def compute(tile: Tile, kv: Any) -> None:
        clear_tail(config, kv, tile.num_keys)

        def part(index: jax.Array, _: None) -> None:
            first_key = tile.first_key + index * config.compute_tokens
            is_whole = first_key + config.compute_tokens - 1 <= tile.first_query
            if config.sliding_window is not None:
                is_whole &= first_key > tile.first_query + config.query_tile - 1 - config.sliding_window
            # Most parts are seen by every query and need no mask. Of the others some keys are seen by none.
            num_seen = jnp.minimum(tile.num_keys - index * config.compute_tokens, config.compute_tokens)
            num_masked = pl.cdiv(num_seen, config.masked_tokens)

            @pl.when(~is_whole)
            def masked() -> None:
                def step(step: jax.Array, _: None) -> None:
                    number, group = step // num_groups, step % num_groups
                    offset = number * config.masked_blocks
                    blocks = Blocks(index * config.compute_blocks + offset, config.masked_blocks)
                    mask = (first_key + offset * config.block_size, tile.first_query)
                    some_heads(kv, blocks, group, mask)

                jax.lax.fori_loop(0, num_masked * num_groups, step, None)

            @pl.when(is_whole)
            def whole() -> None:
                blocks = Blocks(index * config.compute_blocks, config.compute_blocks)
                jax.lax.fori_loop(0, num_groups, lambda group, _: some_heads(kv, blocks, group, None), None)

        num_parts = (tile.num_keys + config.compute_tokens - 1) // config.compute_tokens
        jax.lax.fori_loop(0, num_parts, part, None)

    def some_heads(kv: Any, blocks: Blocks, group: jax.Array, mask: tuple[jax.Array, jax.Array] | None) -> None:
        """Computes heads_at_a_time KV heads against some blocks of the tile."""
        at_a_time = config.num_kv_heads // num_groups
        heads = [group * at_a_time + number for number in range(at_a_time)]
        size = row_block if mask is None else masked_row_block
        units = [(head, slice(first, first + size)) for head in heads for first in range(0, num_rows, size)]
        ahead = multiply_keys(kv, blocks, *units[0])
        for (head, rows), following in zip(units, [*units[1:], None], strict=True):
            products = ahead
            if following is not None:  # the matrix unit goes on while this unit's softmax is computed
                ahead = multiply_keys(kv, blocks, *following)
            scores = cap_scores(products, config.logit_soft_cap)
            if mask is not None:
                scores = jnp.where(_visible(config, rows, scores.shape[1], *mask), scores, HIDDEN)
            add_values(load_values(config, kv, blocks, head), scores, head, rows)

    def multiply_keys(kv: Any, blocks: Blocks, head: jax.Array, rows: slice) -> jax.Array:
        return multiply(config, queries[head, rows], load_keys(config, kv, blocks, head), transpose=True)

    def add_values(values: jax.Array, scores: jax.Array, head: jax.Array, rows: slice) -> None:
        """Adds the values to the weighted sums of some rows."""
        step = flash_step(scores, maximum[head, rows], total[head, rows])
        weights = step.weights.astype(config.compute_dtype)
        if has_sums:
            values = jnp.concatenate([values, jnp.ones_like(values)], axis=1)
        products = multiply(config, weights, values)
        weighted[head, rows] = weighted[head, rows] * widen(step.shrink, config.width) + products[:, : config.width]
        maximum[head, rows] = step.maximum
        if has_sums:
            total[head, rows] = total[head, rows] * step.shrink + products[:, config.width :]
        else:
            total[head, rows] = step.total

    def finish(out: jax.Array) -> None:
        for head in range(config.num_kv_heads):
            for chunk in chunks(config):
                sums = total[head, chunk]
                if not has_sums:
                    sums = jnp.sum(sums, axis=1, keepdims=True)
                result = weighted[head, chunk] * (config.v_scale / sums)
                store_rows(config, out, words, head, chunk, result)
                weighted[head, chunk] = jnp.zeros_like(result)
            reset_columns(head)
        unstage_results(config, out, words)

    return Compute(reset, start, compute, finish)


def _visible(config: TpuConfig, rows: slice, num_keys: int, first_key: jax.Array, first_query: jax.Array) -> jax.Array:
    """Returns which of num_keys keys these rows of a tile see: [R, num_keys].

    What differs between the lane tiles is a scalar, so that a comparison is all that each register costs.
    """
    token = token_of_rows(config, rows, LANES)
    offset = jax.lax.broadcasted_iota(jnp.int32, token.shape, 1) - token
    nearest = first_query - first_key
    return jnp.concatenate(
        [is_visible(offset, nearest - first, config.sliding_window) for first in range(0, num_keys, LANES)], axis=1
    )


def _has_sums(config: TpuConfig) -> bool:
    """Whether columns of ones beside the values add up the weights: values of one lane tile leave room for them."""
    return bool(config.sizes.sums_by_products) and config.width == LANES


def _row_block(config: TpuConfig, limit: int | None = None) -> int:
    """Returns the largest divisor of a KV head's rows that is a multiple of 16, at most sizes.row_block and limit."""
    num_rows, largest = config.query_tile * config.group, min(config.sizes.row_block, limit or config.sizes.row_block)
    return max(size for size in range(16, max(16, largest) + 1, 16) if num_rows % size == 0)


def heads_at_a_time(config: TpuConfig) -> int:
    """Returns the largest divisor of K with at most sizes.prefill_units units, or 1."""
    num_rows = config.query_tile * config.group
    limit = max(1, config.sizes.prefill_units // (num_rows // _row_block(config)))
    return max(heads for heads in range(1, limit + 1) if config.num_kv_heads % heads == 0)
