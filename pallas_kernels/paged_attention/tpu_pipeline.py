"""Data movement of the TPU kernels: queries in, blocks of keys and values in, results out, one step ahead of the work.

The work is a list of rows: one row is up to query_tile tokens of one sequence. A row walks over its context in tiles
of blocks_per_tile blocks, from the first block that its window reaches. While a tile is being computed the next one
is on its way, the next row's first tile included. Knows no attention: that is `Compute`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_config import TpuConfig


class Work(NamedTuple):
    """The rows, as scalars in SMEM. R is a bound on their number.

    Example, block_size 16, query_tile 4, window 20: the tokens 40..45 of sequence 2, which are the step's tokens
    7..12, are two rows: num_rows 2, seq [2, 2], token [7, 11], num_queries [4, 2], first_block [1, 1] (position 40
    sees back to 21, position 44 to 25), end [44, 46].
    """

    num_rows: jax.Array  # [1]
    seq: jax.Array  # [R] row of the block tables
    token: jax.Array  # [R] first query, in q
    num_queries: jax.Array  # [R]
    first_block: jax.Array  # [R] first block that any of its queries sees, in the sequence
    end: jax.Array  # [R] tokens of the sequence up to and with its last query
    tables: jax.Array  # [S * B] block ids


class Tile(NamedTuple):
    """What is to be computed: queries of one row against one tile of its context."""

    first_query: jax.Array  # position of the row's first query in its sequence
    first_key: jax.Array  # position of the tile's first token
    num_keys: jax.Array  # tokens in the tile


class Compute(NamedTuple):
    """The attention itself, on refs in VMEM. `start` comes before a row's first tile and `finish` after its last."""

    start: Callable[[Any], None]  # (query buffer of the row)
    tile: Callable[[Tile, Any], None]  # (tile, its KV buffer [blocks, planes, P, 128])
    finish: Callable[[Any], None]  # (result buffer of the row)


class Buffers(NamedTuple):
    """Refs, two of each, so that one can be filled or emptied while the other is in use; a semaphore for either."""

    q: Any  # [2, query_tile, K, G, D]
    kv: Any  # [2, blocks_per_tile, planes, P, 128]
    out: Any  # [2, query_tile, K, G, D]
    q_sem: Any
    kv_sem: Any
    out_sem: Any


def run(config: TpuConfig, work: Work, q: Any, kv: Any, out: Any, buffers: Buffers, compute: Compute) -> None:
    """Runs every row. q, kv and out are refs in HBM: [T, K, G, D], [N, planes, P, 128], [T, K, G, D]."""
    num_rows = work.num_rows[0]
    block_size, blocks_per_tile = config.block_size, config.blocks_per_tile

    def copy_q(row: jax.Array) -> Any:
        slot, tokens = row % 2, work.num_queries[row]
        source = q.at[pl.ds(work.token[row], tokens)]
        return pltpu.make_async_copy(source, buffers.q.at[slot, pl.ds(0, tokens)], buffers.q_sem.at[slot])

    def copy_out(row: jax.Array) -> Any:
        slot, tokens = row % 2, work.num_queries[row]
        destination = out.at[pl.ds(work.token[row], tokens)]
        return pltpu.make_async_copy(buffers.out.at[slot, pl.ds(0, tokens)], destination, buffers.out_sem.at[slot])

    def tile_blocks(row: jax.Array, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the tile's first block in its sequence, and how many blocks it has."""
        first = work.first_block[row] + tile * blocks_per_tile
        return first, jnp.minimum(pl.cdiv(work.end[row], block_size) - first, blocks_per_tile)

    def start_kv(row: jax.Array, tile: jax.Array, slot: jax.Array) -> None:
        first, num_blocks = tile_blocks(row, tile)
        base = work.seq[row] * config.table_width + first

        def start(index: jax.Array, _: None) -> None:
            source = kv.at[work.tables[base + index]]
            pltpu.make_async_copy(source, buffers.kv.at[slot, index], buffers.kv_sem.at[slot]).start()

        jax.lax.fori_loop(0, num_blocks, start, None)

    def wait_kv(row: jax.Array, tile: jax.Array, slot: jax.Array) -> None:
        _, num_blocks = tile_blocks(row, tile)
        blocks = pl.ds(0, num_blocks)  # all the copies at once: only the size counts
        pltpu.make_async_copy(kv.at[blocks], buffers.kv.at[slot, blocks], buffers.kv_sem.at[slot]).wait()

    def run_row(row: jax.Array, step: jax.Array) -> jax.Array:
        num_blocks = pl.cdiv(work.end[row], block_size) - work.first_block[row]
        num_tiles = pl.cdiv(num_blocks, blocks_per_tile)
        pl.when(row + 1 < num_rows)(lambda: copy_q(row + 1).start())
        copy_q(row).wait()
        compute.start(buffers.q.at[row % 2])

        def run_tile(tile: jax.Array, step: jax.Array) -> jax.Array:
            slot, is_last = step % 2, tile + 1 == num_tiles
            next_row, next_tile = jnp.where(is_last, row + 1, row), jnp.where(is_last, 0, tile + 1)
            pl.when(next_row < num_rows)(lambda: start_kv(next_row, next_tile, 1 - slot))
            wait_kv(row, tile, slot)
            first_key = (work.first_block[row] + tile * blocks_per_tile) * block_size
            num_keys = jnp.minimum(work.end[row] - first_key, blocks_per_tile * block_size)
            first_query = work.end[row] - work.num_queries[row]
            compute.tile(Tile(first_query, first_key, num_keys), buffers.kv.at[slot])
            return step + 1

        step = jax.lax.fori_loop(0, num_tiles, run_tile, step)
        pl.when(row >= 2)(lambda: copy_out(row - 2).wait())
        compute.finish(buffers.out.at[row % 2])
        copy_out(row).start()
        return step

    @pl.when(num_rows > 0)
    def _() -> None:
        copy_q(jnp.int32(0)).start()
        start_kv(jnp.int32(0), jnp.int32(0), jnp.int32(0))

    jax.lax.fori_loop(0, num_rows, run_row, jnp.int32(0))
    pl.when(num_rows >= 2)(lambda: copy_out(num_rows - 2).wait())
    pl.when(num_rows >= 1)(lambda: copy_out(num_rows - 1).wait())
