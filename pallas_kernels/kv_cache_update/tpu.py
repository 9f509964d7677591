"""Writes to a KV cache in planes, and copies of its blocks, on TPUs.

XLA's scatter is slow there, and one token's row is less than the smallest piece of a plane that can be copied. So
rows that lie in one piece, the rows of one packed register, are written together: the piece is read, the new rows take
their places in it, it is written back. Many pieces are on their way at once, since each waits for memory twice.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.kv_layout import LANES, piece_rows

BUFFER_BYTES = 2 << 20  # of the pieces on their way
MAX_PIECES = 32


class Writes(NamedTuple):
    """The pieces to write, as scalars in SMEM.

    Example, pieces of 16 rows: tokens 3, 4, 5 for slots 30, 31, 32 are two writes, of tokens 3 and 4 to rows 14 and 15
    of piece 1, and of token 5 to row 0 of piece 2: num_writes 2, token [3, 5], slot [30, 32], num_rows [2, 1].
    """

    num_writes: jax.Array  # [1]
    token: jax.Array  # [T] first token
    slot: jax.Array  # [T] its slot
    num_rows: jax.Array  # [T] tokens, in consecutive slots of one piece


def list_writes(slots: jax.Array, block_size: int, rows: int) -> Writes:
    """Groups slots: [T] by pieces of `rows` rows. Tokens for the null block are left out."""
    num_tokens = slots.shape[0]
    before = jnp.concatenate([jnp.full_like(slots[:1], -1), slots[:-1]])
    is_real = slots >= block_size
    is_first = is_real & ((slots != before + 1) | (slots % rows == 0) | (before < block_size))
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    # Each token's distance to the next first token, or to the first padding token after it.
    end = jax.lax.cummin(jnp.where(is_first | ~is_real, index, num_tokens), reverse=True)
    num_rows = jnp.concatenate([end[1:], jnp.full_like(end[:1], num_tokens)]) - index
    order = jnp.argsort(~is_first, stable=True).astype(jnp.int32)
    return Writes(jnp.sum(is_first, dtype=jnp.int32)[None], order, slots[order], num_rows[order])


# Traced and lowered once for all layers that are alike.
@functools.partial(jax.jit, static_argnames="interpret")
def write_planes(cache: jax.Array, new: jax.Array, slots: jax.Array, *, interpret: Any = False) -> jax.Array:
    """Writes new: [T, planes, 128] into cache: [N, planes, P, 128], in place. See kv_cache_update about slots."""
    _, num_planes, block_size, _ = cache.shape
    rows = piece_rows(block_size, cache.dtype)
    writes = list_writes(slots, block_size, rows)
    piece_bytes = num_planes * rows * LANES * cache.dtype.itemsize
    num_pieces = max(2, min(MAX_PIECES, BUFFER_BYTES // piece_bytes, new.shape[0]))
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(writes),
        grid=(1,),
        in_specs=[hbm, hbm],
        out_specs=hbm,
        scratch_shapes=[
            pltpu.VMEM((num_pieces, rows, num_planes, LANES), new.dtype),
            pltpu.VMEM((num_pieces, num_planes, rows, LANES), cache.dtype),
            *(pltpu.SemaphoreType.DMA((num_pieces,)),) * 3,
        ],
    )
    return pl.pallas_call(
        functools.partial(_write_kernel, block_size),
        grid_spec=grid_spec,
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={len(writes) + 1: 0},
        interpret=interpret,
        name="kv_cache_update",
    )(*writes, new, cache)


def _write_kernel(block_size: int, num_writes_ref: Any, token: Any, slot: Any, num_rows: Any, *refs: Any) -> None:
    new, _, cache, new_buffer, piece_buffer, new_sem, read_sem, write_sem = refs
    num_writes, (num_pieces, rows, *_) = num_writes_ref[0], new_buffer.shape

    def piece(write: jax.Array) -> Any:
        first = pl.multiple_of(slot[write] % block_size // rows * rows, rows)
        return cache.at[slot[write] // block_size, :, pl.ds(first, rows)]

    def copy_new(write: jax.Array) -> Any:
        at, count = write % num_pieces, num_rows[write]
        destination = new_buffer.at[at, pl.ds(slot[write] % rows, count)]
        return pltpu.make_async_copy(new.at[pl.ds(token[write], count)], destination, new_sem.at[at])

    def read(write: jax.Array) -> Any:
        at = write % num_pieces
        return pltpu.make_async_copy(piece(write), piece_buffer.at[at], read_sem.at[at])

    def write_back(write: jax.Array) -> Any:
        at = write % num_pieces
        return pltpu.make_async_copy(piece_buffer.at[at], piece(write), write_sem.at[at])

    def start(write: jax.Array) -> None:
        pl.when(write >= num_pieces)(lambda: write_back(write - num_pieces).wait())
        copy_new(write).start()
        read(write).start()

    ahead = num_pieces // 2
    jax.lax.fori_loop(0, jnp.minimum(ahead, num_writes), lambda write, _: start(write), None)

    def step(write: jax.Array, _: None) -> None:
        pl.when(write + ahead < num_writes)(lambda: start(write + ahead))
        copy_new(write).wait()
        read(write).wait()
        at, first = write % num_pieces, slot[write] % rows
        row = jax.lax.broadcasted_iota(jnp.int32, piece_buffer.shape[1:], 1)
        is_new = (row >= first) & (row < first + num_rows[write])
        mine = jnp.swapaxes(new_buffer[at].astype(jnp.float32), 0, 1)  # [planes, rows, 128]
        merged = jnp.where(is_new, mine, piece_buffer[at].astype(jnp.float32))
        piece_buffer[at] = merged.astype(piece_buffer.dtype)
        write_back(write).start()

    jax.lax.fori_loop(0, num_writes, step, None)
    first_left = jnp.maximum(num_writes - num_pieces, 0)
    jax.lax.fori_loop(first_left, num_writes, lambda write, _: write_back(write).wait(), None)


def copy_blocks_tpu(
    cache: jax.Array, sources: jax.Array, destinations: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """Copies blocks of cache: [N, ...] in place, all at once. See copy_blocks."""
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(1,),
        in_specs=[hbm],
        out_specs=hbm,
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    )
    return pl.pallas_call(
        _copy_kernel,
        grid_spec=grid_spec,
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={2: 0},
        interpret=interpret,
        name="copy_blocks",
    )(sources, destinations, cache)


def _copy_kernel(sources: Any, destinations: Any, _: Any, cache: Any, sem: Any) -> None:
    def copy(index: jax.Array) -> Any:
        return pltpu.make_async_copy(cache.at[sources[index]], cache.at[destinations[index]], sem)

    def for_each(action: Any) -> None:
        def body(index: jax.Array, _: None) -> None:
            pl.when(sources[index] != destinations[index])(lambda: action(copy(index)))

        jax.lax.fori_loop(0, sources.shape[0], body, None)

    for_each(lambda descriptor: descriptor.start())
    for_each(lambda descriptor: descriptor.wait())
