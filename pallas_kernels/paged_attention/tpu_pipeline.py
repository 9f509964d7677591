"""Data movement of the TPU kernels: queries in, blocks of keys and values in, results out, one step ahead of the work.

The work is cut into rows: one row is up to query_tile tokens of one sequence. Decode takes the sequences with one
query, prefill all others, in whatever order they stand; each finds its rows by itself, from the batch's metadata. A
row walks over its context in tiles of blocks_per_tile blocks, from the first block that its window reaches. While a
tile is being computed the next one is on its way, the next row's first tile included. Knows no attention: that is
`Compute`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_config import TpuConfig


class Batch(NamedTuple):
    """The batch's metadata, as scalars in SMEM."""

    block_tables: Any  # [S * B] block ids
    seq_lens: Any  # [S]
    query_start_loc: Any  # [S + 1]


class Row(NamedTuple):
    """Some queries of one sequence.

    Example, block_size 16, query_tile 4, window 20: the tokens 40..45 of sequence 2, which are the step's tokens
    7..12, are two rows: seq 2, offset 0 and 4, token 7 and 11, num_queries 4 and 2, end 44 and 46, first_block 1 and 1
    (position 40 sees back to 21, position 44 to 25).
    """

    seq: jax.Array  # row of the block tables; S: there is no such row
    offset: jax.Array  # first query, in the sequence's queries
    token: jax.Array  # first query, in q
    num_queries: jax.Array
    end: jax.Array  # tokens of the sequence up to and with the last query
    first_block: jax.Array  # first block that any of the queries sees, in the sequence


class Tile(NamedTuple):
    """What is to be computed: queries of one row against one tile of its context."""

    first_query: jax.Array  # position of the row's first query in its sequence
    first_key: jax.Array  # position of the tile's first token
    num_keys: jax.Array  # tokens in the tile


class Compute(NamedTuple):
    """The attention itself, on refs in VMEM. `start` comes before a row's first tile and `finish` after its last."""

    reset: Callable[[], None]  # once, before the first row; none of it where there is no row
    start: Callable[[Any], None]  # (query buffer of the row)
    tile: Callable[[Tile, Any], None]  # (tile, its KV buffer [blocks, planes, P, 128])
    finish: Callable[[Any], None]  # (result buffer of the row)


class Buffers(NamedTuple):
    """Refs, two of each, so that one can be filled or emptied while the other is in use; a semaphore for either."""

    q: Any  # [2, query_tile, H, W]
    kv: Any  # [2, blocks_per_tile, planes, P, 128]
    out: Any  # [2, query_tile, H, W]
    q_sem: Any
    kv_sem: Any
    out_sem: Any


def find_row(config: TpuConfig, batch: Batch, seq: jax.Array, offset: jax.Array) -> Row:
    """Returns the first row at or after one query of one sequence."""
    num_seqs = batch.seq_lens.shape[0]

    def query_len(seq: jax.Array) -> jax.Array:
        return batch.query_start_loc[seq + 1] - batch.query_start_loc[seq]

    def is_taken(seq: jax.Array) -> jax.Array:
        return query_len(seq) == 1 if config.query_tile == 1 else query_len(seq) > 1

    is_here = offset < query_len(seq)
    seq, offset = jnp.where(is_here, seq, seq + 1), jnp.where(is_here, offset, 0)

    def is_other(seq: jax.Array) -> jax.Array:
        return (seq < num_seqs) & ~is_taken(jnp.minimum(seq, num_seqs - 1))

    seq = jax.lax.while_loop(is_other, lambda seq: seq + 1, seq)
    last = jnp.minimum(seq, num_seqs - 1)  # past the end nobody looks at the rest
    num_queries = jnp.minimum(query_len(last) - offset, config.query_tile)
    end = batch.seq_lens[last] - query_len(last) + offset + num_queries
    first_block = jnp.int32(0)
    if config.sliding_window is not None:
        first_block = jnp.maximum(end - num_queries - config.sliding_window + 1, 0) // config.block_size
    return Row(seq, offset, batch.query_start_loc[last] + offset, num_queries, end, first_block)


def run(config: TpuConfig, batch: Batch, q: Any, kv: Any, out: Any, buffers: Buffers, compute: Compute) -> None:
    """Runs every row. q, kv and out are refs in HBM: [T, H, W], [N, planes, P, 128], [T, H, W]."""
    num_seqs = batch.seq_lens.shape[0]
    block_size, blocks_per_tile = config.block_size, config.blocks_per_tile

    def copy_q(row: Row, slot: jax.Array) -> Any:
        source = q.at[pl.ds(row.token, row.num_queries)]
        return pltpu.make_async_copy(source, buffers.q.at[slot, pl.ds(0, row.num_queries)], buffers.q_sem.at[slot])

    def copy_out(token: jax.Array, num_queries: jax.Array, slot: jax.Array) -> Any:
        source = buffers.out.at[slot, pl.ds(0, num_queries)]
        return pltpu.make_async_copy(source, out.at[pl.ds(token, num_queries)], buffers.out_sem.at[slot])

    def tile_blocks(row: Row, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the tile's first block in its sequence, and how many blocks it has."""
        first = row.first_block + tile * blocks_per_tile
        return first, jnp.minimum(pl.cdiv(row.end, block_size) - first, blocks_per_tile)

    def start_kv(row: Row, tile: jax.Array, slot: jax.Array) -> None:
        first, num_blocks = tile_blocks(row, tile)
        base = row.seq * config.table_width + first

        def start(index: jax.Array, _: None) -> None:
            source = kv.at[batch.block_tables[base + index]]
            pltpu.make_async_copy(source, buffers.kv.at[slot, index], buffers.kv_sem.at[slot]).start()

        jax.lax.fori_loop(0, num_blocks, start, None)

    def wait_kv(row: Row, tile: jax.Array, slot: jax.Array) -> None:
        _, num_blocks = tile_blocks(row, tile)
        blocks = pl.ds(0, num_blocks)  # all the copies at once: only the size counts
        pltpu.make_async_copy(kv.at[blocks], buffers.kv.at[slot, blocks], buffers.kv_sem.at[slot]).wait()

    def run_row(carry: tuple[Row, jax.Array, jax.Array, jax.Array]) -> tuple[Row, jax.Array, jax.Array, jax.Array]:
        """Runs one row. Carries the row, how many rows and tiles there were, and num_queries of the row before."""
        row, number, step, before = carry
        slot = number % 2
        num_tiles = pl.cdiv(pl.cdiv(row.end, block_size) - row.first_block, blocks_per_tile)
        next_row = find_row(config, batch, row.seq, row.offset + config.query_tile)
        has_next = next_row.seq < num_seqs
        pl.when(has_next)(lambda: copy_q(next_row, 1 - slot).start())
        copy_q(row, slot).wait()
        compute.start(buffers.q.at[slot])

        def run_tile(tile: jax.Array, step: jax.Array) -> jax.Array:
            slot, is_last = step % 2, tile + 1 == num_tiles
            ahead = Row(*(jnp.where(is_last, other, mine) for mine, other in zip(row, next_row, strict=True)))
            pl.when(~is_last | has_next)(lambda: start_kv(ahead, jnp.where(is_last, 0, tile + 1), 1 - slot))
            wait_kv(row, tile, slot)
            first_key = (row.first_block + tile * blocks_per_tile) * block_size
            num_keys = jnp.minimum(row.end - first_key, blocks_per_tile * block_size)
            compute.tile(Tile(row.end - row.num_queries, first_key, num_keys), buffers.kv.at[slot])
            return step + 1

        step = jax.lax.fori_loop(0, num_tiles, run_tile, step)
        compute.finish(buffers.out.at[slot])
        # One result is on its way at a time, so that there is one size to remember.
        pl.when(number > 0)(lambda: copy_out(jnp.int32(0), before, 1 - slot).wait())
        copy_out(row.token, row.num_queries, slot).start()
        return next_row, number + 1, step, row.num_queries

    zero = jnp.int32(0)
    first_row = find_row(config, batch, zero, zero)

    @pl.when(first_row.seq < num_seqs)
    def start_first() -> None:
        copy_q(first_row, zero).start()
        start_kv(first_row, zero, zero)
        compute.reset()

    carry = (first_row, zero, zero, zero)
    _, number, _, before = jax.lax.while_loop(lambda carry: carry[0].seq < num_seqs, run_row, carry)
    pl.when(number > 0)(lambda: copy_out(zero, before, (number - 1) % 2).wait())
