"""Attention of one query a sequence on TPUs: all its heads against a tile of keys and values.

A register holds eight rows of scores, but a KV head has only `group` query heads. So the heads are taken ROWS at a
time, several KV heads together where the group is small: each KV head's product is computed for all the rows, and
each row keeps that of its own head. The softmax then works on full registers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.flash import HIDDEN, LOWEST, cap_scores, flash_step, is_visible, query_scale, widen
from pallas_kernels.paged_attention.kv_layout import LANES
from pallas_kernels.paged_attention.tpu_config import TpuConfig
from pallas_kernels.paged_attention.tpu_pipeline import Compute, Tile
from pallas_kernels.paged_attention.tpu_tile import Blocks, clear_tail, load_keys, load_values, multiply

ROWS = 8


def scratch_shapes(config: TpuConfig) -> list[Any]:
    """Queries, running maximum, running sum, weighted sum."""
    rows = _num_rows(config)
    return [
        pltpu.VMEM((rows, config.width), config.compute_dtype),
        pltpu.VMEM((rows, LANES), jnp.float32),
        pltpu.VMEM((rows, LANES), jnp.float32),
        pltpu.VMEM((rows, config.width), jnp.float32),
    ]


def spread_sinks(config: TpuConfig, sinks: jax.Array) -> jax.Array:
    """Returns sinks: [H] as the kernel reads them, [rows, 128]."""
    padded = jnp.pad(sinks, (0, _num_rows(config) - config.num_heads))
    return jnp.broadcast_to(padded[:, None], (padded.shape[0], LANES))


def make_compute(
    config: TpuConfig,
    sinks: jax.Array | None,
    queries: jax.Array,
    maximum: jax.Array,
    total: jax.Array,
    weighted: jax.Array,
) -> Compute:
    """Returns the attention on these refs, which are scratch_shapes'."""
    num_rows, num_heads = _num_rows(config), config.num_heads

    def start(q: jax.Array) -> None:
        scaled = q[0].astype(jnp.float32) * query_scale(config.scale, config.logit_soft_cap)
        padded = jnp.pad(scaled, ((0, num_rows - num_heads), (0, 0)))
        queries[...] = padded.astype(config.compute_dtype)
        maximum[...] = jnp.full_like(maximum, LOWEST) if sinks is None else sinks[...]
        total[...] = jnp.full_like(total, 0.0 if sinks is None else 1.0 / LANES)
        weighted[...] = jnp.zeros_like(weighted)

    def multiply_keys(kv: jax.Array, blocks: Blocks, first: int) -> jax.Array:
        """Returns the products of ROWS queries with the keys of their KV heads: [ROWS, compute_tokens]."""
        rows = queries[first : first + ROWS]
        products = [
            multiply(config, rows, load_keys(config, kv, blocks, head), transpose=True)
            for head in _heads_of(config, first)
        ]
        return _pick(config, first, products)

    def add_values(kv: jax.Array, blocks: Blocks, first: int, scores: jax.Array) -> None:
        """Adds the values to the weighted sums of ROWS queries."""
        rows = slice(first, first + ROWS)
        step = flash_step(scores, maximum[rows], total[rows])
        weights = step.weights.astype(config.compute_dtype)
        products = [
            multiply(config, weights, load_values(config, kv, blocks, head)) for head in _heads_of(config, first)
        ]
        shrunk = weighted[rows] * widen(step.shrink, config.width)
        weighted[rows] = shrunk + _pick(config, first, products)
        maximum[rows], total[rows] = step.maximum, step.total

    def compute(tile: Tile, kv: jax.Array) -> None:
        clear_tail(config, kv, tile.num_keys)

        def part(index: jax.Array, _: None) -> None:
            iota = jax.lax.broadcasted_iota(jnp.int32, (ROWS, config.compute_tokens), 1)
            keys = tile.first_key + index * config.compute_tokens + iota
            visible = is_visible(keys, tile.first_query, config.sliding_window)
            chunks = range(0, num_rows, ROWS)
            blocks = Blocks(index * config.compute_blocks, config.compute_blocks)
            ahead = multiply_keys(kv, blocks, chunks[0])
            for first in chunks:
                products = ahead
                if first + ROWS < num_rows:  # the matrix unit goes on while this chunk's softmax is computed
                    ahead = multiply_keys(kv, blocks, first + ROWS)
                scores = cap_scores(products, config.logit_soft_cap)
                add_values(kv, blocks, first, jnp.where(visible, scores, HIDDEN))

        num_parts = (tile.num_keys + config.compute_tokens - 1) // config.compute_tokens
        jax.lax.fori_loop(0, num_parts, part, None)

    def finish(out: jax.Array) -> None:
        result = weighted[...] * (config.v_scale / jnp.sum(total[...], axis=1, keepdims=True))
        out[0] = result[:num_heads].astype(out.dtype)

    return Compute(lambda: None, start, compute, finish)


def _num_rows(config: TpuConfig) -> int:
    return -(-config.num_heads // ROWS) * ROWS


def _heads_of(config: TpuConfig, first_row: int) -> range:
    """Returns the KV heads of ROWS rows."""
    last_row = min(first_row + ROWS, config.num_heads) - 1
    return range(first_row // config.group, last_row // config.group + 1)


def _pick(config: TpuConfig, first_row: int, products: list[jax.Array]) -> jax.Array:
    """Lets each row choose its KV head's product. products: one [ROWS, X] for each head of _heads_of."""
    row = first_row + jax.lax.broadcasted_iota(jnp.int32, products[0].shape, 0)
    chosen = products[0]
    for head, product in zip(_heads_of(config, first_row)[1:], products[1:], strict=True):
        chosen = jnp.where(row >= head * config.group, product, chosen)
    return chosen
