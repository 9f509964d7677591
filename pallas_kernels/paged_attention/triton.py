"""Paged attention for NVIDIA GPUs from Ampere on: Pallas kernels lowered through Triton.

The batch becomes tiles: some consecutive queries of one sequence times the query heads of one KV head. A program of
the grid takes one tile and walks over its context a chunk at a time, reading each chunk's keys and values through the
block table by pointer. One kernel serves both cases:

- Prefill: many queries a tile.
- Decode: one query a tile, a tile a sequence. That may be few, so the context of each may be split over several
  programs whose partial results are joined afterwards.

Each case takes the sequences that are its own, wherever they stand in the batch; a tile left over has no context and
ends at once. What no query of a tile sees is never read. Knows nothing of other backends.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.paged_attention.flash import HIDDEN, LOG2_E, LOWEST, flash_step, is_visible, scale_scores
from pallas_kernels.paged_attention.triton_tiling import Tiling, decode_tiling, pow2_ceil, prefill_tiling

_FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
_E4M3_FACTOR = 256.0  # what _load leaves out
# Each float32 as two numbers of TF32: on tensor cores, and off by some 1e-6. Without them float32 is many times slower.
_THREE_PRODUCTS = lax.DotAlgorithmPreset.TF32_TF32_F32_X3


class _Options(NamedTuple):
    """What is static of a call beside its tiling."""

    scale: float  # of the scores, the stored keys' scale included
    v_scale: float
    window: int | None
    cap: float | None
    has_sinks: bool
    precision: Any  # of products of float32, as lax.dot_general takes it


def paged_attention_triton(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array | None,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    interpret: bool = False,
) -> jax.Array:
    """See pallas_kernels.paged_attention.paged_attention.

    The caches are [N, P, K, D], v_cache None where values are keys, in q's dtype or another float, in int8,
    float8_e4m3fn or float8_e5m2. With those of one byte a number bfloat16 queries are taken as float16, so they must
    lie in its range of 65504.
    interpret runs the kernels in Pallas's interpreter on any machine, for tests. Static.
    """
    _check_cache(k_cache)
    v_cache = k_cache if v_cache is None else v_cache
    num_tokens, num_heads, head_dim = q.shape
    num_seqs, num_kv_heads = len(seq_lens), k_cache.shape[2]
    group = num_heads // num_kv_heads
    factor, is_float32 = _E4M3_FACTOR if k_cache.dtype == jnp.float8_e4m3fn else 1.0, q.dtype == jnp.float32
    options = _Options(
        scale=scale * k_scale * factor,
        v_scale=v_scale * factor,
        window=sliding_window,
        cap=logit_soft_cap,
        has_sinks=sinks is not None,
        precision=lax.Precision.HIGHEST if interpret else _THREE_PRODUCTS,  # which no CPU has
    )
    arrays = (block_tables, q, k_cache, v_cache, *([] if sinks is None else [sinks]))
    call = functools.partial(_attend, arrays=arrays, options=options, interpret=interpret)
    query_lens = query_start_loc[1:] - query_start_loc[:-1]

    tiling = prefill_tiling(group, head_dim, is_float32=is_float32)
    tiles = _prefill_tiles(query_start_loc[:-1], query_lens, seq_lens, num_tokens, tiling.queries)
    (out,) = call(tiles, tiling=tiling)
    itemsize = 4 if is_float32 else k_cache.dtype.itemsize
    max_context = block_tables.shape[1] * k_cache.shape[1]
    tiling = decode_tiling(group, head_dim, itemsize, num_seqs, num_kv_heads, max_context)
    is_decode = query_lens == 1
    columns = jnp.arange(num_seqs), query_start_loc[:-1], is_decode, seq_lens - 1
    tiles = jnp.stack([column.astype(jnp.int32) for column in columns], axis=1)
    if tiling.num_splits == 1:
        (out,) = call(tiles, tiling=tiling, out=out)
        return out
    decoded = _join(*call(tiles, tiling=tiling)) * options.v_scale  # [S, H, D]
    return out.at[jnp.where(is_decode, query_start_loc[:-1], num_tokens)].set(decoded.astype(out.dtype), mode="drop")


def _check_cache(cache: jax.Array) -> None:
    """Refuses what the lowering would address wrongly: it computes with 32 bits up to 4 GiB, elements signed."""
    if cache.dtype.itemsize == 1 and 2**31 < cache.size <= 2**32:
        raise ValueError(
            f"a {cache.dtype} cache of {cache.size} elements can't be addressed: have at most {2**31} or more than "
            f"{2**32}, so set fewer or more blocks"
        )


def _prefill_tiles(
    first: jax.Array,  # [S] first query
    query_lens: jax.Array,  # [S]
    seq_lens: jax.Array,  # [S]
    num_tokens: int,
    size: int,
) -> jax.Array:
    """Cuts the sequences with two queries or more into tiles of `size` queries.

    Returns:
      [X, 4] int32 rows as the kernel takes them. X is what any batch of this shape needs at most; rows left over have
      no queries. With 5, 1 and 2 queries and size 4 the sequences are 0, 0, 2 and the numbers of queries 4, 1, 2.
    """
    num_seqs = len(seq_lens)
    num_tiles = jnp.where(query_lens > 1, (query_lens + size - 1) // size, 0)  # [S]
    ends = jnp.cumsum(num_tiles)
    index = jnp.arange(num_tokens // size + min(num_seqs, num_tokens // 2) + 1)
    seq = jnp.minimum(jnp.sum(ends[None, :] <= index[:, None], axis=1), num_seqs - 1)  # [X]
    offset = (index - (ends - num_tiles)[seq]) * size
    count = jnp.where(index < ends[-1], jnp.clip(query_lens[seq] - offset, 0, size), 0)
    columns = seq, first[seq] + offset, count, (seq_lens - query_lens)[seq] + offset
    return jnp.stack([column.astype(jnp.int32) for column in columns], axis=1)


def _attend(
    tiles: jax.Array,  # [X, 4] int32: sequence, first row in q, number of queries, position of the first of them
    *,
    arrays: tuple[jax.Array, ...],
    tiling: Tiling,
    options: _Options,
    interpret: bool,
    out: jax.Array | None = None,
) -> list[jax.Array]:
    """Runs the kernel over all tiles.

    Returns:
      With one split [T, H, D] in q's dtype: `out` with the tiles' rows filled in; without `out` the other rows hold
      rubbish. With more [splits, X, H, D] weighted sums, [splits, X, H] maxima and [splits, X, H] sums of weights.
    """
    q, block_size, num_kv_heads = arrays[1], *arrays[2].shape[1:3]
    num_heads, head_dim = q.shape[1:]
    out_shape = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if tiling.num_splits > 1:
        column = (tiling.num_splits, len(tiles), num_heads)
        out_shape = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*column, head_dim), column, column)]
    caches = [cache.reshape(-1, *cache.shape[2:]) for cache in arrays[2:4]]  # [N * P, K, D]
    inputs = [tiles, *arrays[:2], *caches, *arrays[4:], *([] if out is None else [out])]
    return pl.pallas_call(
        functools.partial(_kernel, num_inputs=len(inputs), block_size=block_size, tiling=tiling, options=options),
        grid=(num_kv_heads * tiling.head_tiles, tiling.num_splits, len(tiles)),
        out_shape=out_shape,
        input_output_aliases={} if out is None else {len(inputs) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name=f"paged_attention_{'prefill' if tiling.queries > 1 else 'decode'}",
    )(*inputs)


class _Rows(NamedTuple):
    """Where a tile's rows of queries lie. R = tiling.rows, E = head_dim rounded up to a power of two."""

    token: jax.Array  # [R, 1] row in q
    head: jax.Array  # [R, 1]
    position: jax.Array  # [R, 1] in the sequence
    lane: jax.Array  # [1, E]
    is_used: jax.Array  # [R, 1] whether there is such a query
    mask: jax.Array  # [R, E] whether there is such a lane as well


def _kernel(*refs: Any, num_inputs: int, block_size: int, tiling: Tiling, options: _Options) -> None:
    """One tile, or one split of its context."""
    tiles_ref, tables_ref, q_ref, k_ref, v_ref = refs[:5]
    split, tile = pl.program_id(1), pl.program_id(2)
    seq, first, count, position = (tiles_ref[tile, column] for column in range(4))
    kv_head = pl.program_id(0) // tiling.head_tiles
    rows = _rows(first, count, position, kv_head, q_ref.shape, k_ref.shape[1], tiling)
    q = plgpu.load(q_ref.at[rows.token, rows.head, rows.lane], mask=rows.mask, other=0)
    if k_ref.dtype.itemsize == 1 and q.dtype == jnp.bfloat16:
        q = q.astype(jnp.float16)  # which holds every number of the cache, and comes at less cost
    begin = jnp.int32(0) if options.window is None else jnp.maximum(position - options.window + 1, 0)
    end = position + count

    def step(is_whole: bool, chunk: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        context = chunk * tiling.chunk + lax.broadcasted_iota(jnp.int32, (tiling.chunk, 1), 0)
        # [C, 1], by some query
        is_seen = jnp.full(context.shape, True) if is_whole else (context >= begin) & (context < end)
        slot = _slots(tables_ref, seq, chunk * tiling.chunk, context, is_seen, block_size)
        mask = is_seen & (rows.lane < k_ref.shape[2])
        k, v = (_load(ref.at[slot, kv_head, rows.lane], mask, q.dtype) for ref in (k_ref, v_ref))
        scores = scale_scores(_dot(q, k, 1, options.precision), options.scale, options.cap)  # [R, C]
        if not is_whole:
            context = chunk * tiling.chunk + lax.broadcasted_iota(jnp.int32, (1, tiling.chunk), 1)
            scores = jnp.where(is_visible(context, rows.position, options.window), scores, HIDDEN)
        flash = flash_step(scores, *state[:2])
        weighted = _dot(flash.weights.astype(v.dtype), v, 0, options.precision)
        return flash.maximum, flash.total, state[2] * flash.shrink + weighted

    start, stop = _chunks(begin, end, count, split, tiling)
    state = _start(refs[5] if options.has_sinks else None, rows, split, q.shape)
    if options.window is None and tiling.queries > 1:  # most of a prompt's chunks are seen by all queries: no mask
        first_partial = jnp.clip(lax.div(position + 1, jnp.int32(tiling.chunk)), start, stop)
        state = lax.fori_loop(start, first_partial, functools.partial(step, True), state)
        start = first_partial
    state = lax.fori_loop(start, stop, functools.partial(step, False), state)
    _store(refs[num_inputs:], state, rows, tile, split, options.v_scale)


def _chunks(
    begin: jax.Array, end: jax.Array, count: jax.Array, split: jax.Array, tiling: Tiling
) -> tuple[jax.Array, jax.Array]:
    """Returns the first chunk of a split and the one after its last, where a tile sees tokens `begin` to `end`.

    The chunks are dealt out evenly: of 10 chunks and 4 splits, 3, 3, 3 and 1.
    """
    first = lax.div(begin, jnp.int32(tiling.chunk))
    last = jnp.where(count > 0, pl.cdiv(end, tiling.chunk), first)
    num_chunks = pl.cdiv(last - first, tiling.num_splits)
    start = first + split * num_chunks
    return start, jnp.minimum(start + num_chunks, last)


def _rows(
    first: jax.Array,
    count: jax.Array,
    position: jax.Array,
    kv_head: jax.Array,
    q_shape: tuple[int, ...],  # [T, H, D]
    num_kv_heads: int,
    tiling: Tiling,
) -> _Rows:
    """Lays a tile out: the heads of its first query, then those of the second, and so on.

    With 3 heads a KV head and 16 rows, row 7 is head 1 of query 2, and row 15 is not used.
    """
    group, head_dim = q_shape[1] // num_kv_heads, q_shape[2]
    row = lax.broadcasted_iota(jnp.int32, (tiling.rows, 1), 0)
    query, head = lax.div(row, jnp.int32(tiling.heads)), lax.rem(row, jnp.int32(tiling.heads))
    head += (pl.program_id(0) % tiling.head_tiles) * tiling.heads  # in the group
    lane = lax.broadcasted_iota(jnp.int32, (1, pow2_ceil(head_dim)), 1)
    is_used = (query < count) & (head < group)
    return _Rows(first + query, kv_head * group + head, position + query, lane, is_used, is_used & (lane < head_dim))


def _slots(
    tables_ref: Any,  # [S, B]
    seq: jax.Array,
    start: jax.Array,  # a multiple of C
    context: jax.Array,  # [C, 1] positions from `start` on
    is_seen: jax.Array,  # [C, 1]
    block_size: int,
) -> jax.Array:
    """Returns [C, 1] where positions of a sequence lie: block id * P + row. Where not is_seen, anywhere."""
    size = jnp.int32(block_size)
    if block_size % len(context) == 0:  # all of them in one block
        return tables_ref[seq, lax.div(start, size)] * size + lax.rem(start, size) + (context - start)
    block = plgpu.load(tables_ref.at[seq, lax.div(context, size)], mask=is_seen, other=0)
    return block * size + lax.rem(context, size)


def _dot(left: jax.Array, right: jax.Array, axis: int, precision: Any) -> jax.Array:
    """Multiplies along left's last axis and right's `axis`, summed in float32; with `precision` if both are float32."""
    return lax.dot_general(
        left,
        right,
        (((1,), (axis,)), ((), ())),
        precision=precision if left.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _load(place: Any, mask: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Loads keys or values in the compute dtype, zeros where masked. float8_e4m3fn comes _E4M3_FACTOR too small.

    Both fp8 formats are float16 with bits missing: e5m2 at the end, e4m3 at both ends of the exponent too, so that its
    exponent counts from another bias. Hardware converts them only from sm_89 on; this works everywhere.
    """
    if place.dtype not in _FP8:
        return plgpu.load(place, mask=mask, other=0).astype(dtype)
    byte = lax.bitcast_convert_type(plgpu.load(place, mask=mask), jnp.int8)
    bits = jnp.where(mask, byte, 0).astype(jnp.int16)  # the lowering knows no fp8 zero to load instead
    # e4m3: s eeee mmm, widened to ssss ssss s eeee mmm, becomes s 0 eeee mmm 000 0000.
    bits = bits << 8 if place.dtype == jnp.float8_e5m2 else (bits << 7) & ~0x4000
    return lax.bitcast_convert_type(bits, jnp.float16).astype(dtype)


def _start(sinks_ref: Any, rows: _Rows, split: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Returns maximum [R, 1], sum of weights [R, 1] and weighted sum [R, E] before the first chunk.

    A sink is a score that was seen already; of several splits the first has it.
    """
    column = (shape[0], 1)
    maximum, total = jnp.full(column, LOWEST, jnp.float32), jnp.zeros(column, jnp.float32)
    if sinks_ref is not None:
        is_mine = rows.is_used & (split == 0)
        sink = plgpu.load(sinks_ref.at[rows.head], mask=is_mine, other=0).astype(jnp.float32) * LOG2_E
        maximum, total = jnp.where(is_mine, sink, maximum), jnp.where(is_mine, 1.0, total)
    return maximum, total, jnp.zeros(shape, jnp.float32)


def _store(
    out_refs: Sequence[Any],
    state: tuple[jax.Array, ...],
    rows: _Rows,
    tile: jax.Array,
    split: jax.Array,
    v_scale: float,
) -> None:
    """Writes a tile's rows: finished ones into [T, H, D], or maximum, total and weighted sum of a split."""
    maximum, total, weighted = state
    if len(out_refs) == 1:
        out = weighted * (v_scale / jnp.where(total == 0, 1.0, total))
        out_ref = out_refs[0]
        plgpu.store(out_ref.at[rows.token, rows.head, rows.lane], out.astype(out_ref.dtype), mask=rows.mask)
        return
    weighted_ref, maximum_ref, total_ref = out_refs
    # Where a row is masked, the interpreter writes what it read there: that must not be another row's place.
    head = jnp.where(rows.is_used, rows.head, weighted_ref.shape[2])
    plgpu.store(weighted_ref.at[split, tile, head, rows.lane], weighted, mask=rows.mask)
    plgpu.store(maximum_ref.at[split, tile, head], maximum, mask=rows.is_used)
    plgpu.store(total_ref.at[split, tile, head], total, mask=rows.is_used)


def _join(weighted: jax.Array, maximum: jax.Array, total: jax.Array) -> jax.Array:
    """Joins the splits of each tile: [splits, X, H, D], [splits, X, H] and the same, to [X, H, D]."""
    factor = jnp.exp2(maximum - jnp.max(maximum, axis=0))
    total = jnp.sum(total * factor, axis=0)
    return jnp.sum(weighted * factor[..., None], axis=0) / jnp.where(total == 0, 1, total)[..., None]
