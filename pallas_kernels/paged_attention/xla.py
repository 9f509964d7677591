"""Paged attention in plain XLA: the fast path on CPU and the fallback everywhere.

Work grows with what the batch really holds, not with its padded shapes: every loop has a trip count that is read
from seq_lens. Decode tokens go through a loop over context chunks, a group of sequences at a time: cheapest when
sequences of like length stand together. Longer queries are cut into tiles, one tile of one sequence at a time.
Scores are never held for more than one chunk. The sizes were chosen by timing on two cores.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.kv_layout import as_bits, float_of_bits

DECODE_GROUP = 8  # sequences with one token that attend together
DECODE_CHUNK = 32  # context tokens gathered at a time for one group


class _Tiling(NamedTuple):
    """How sequences with at least min_queries tokens are cut, up to where the next tiling begins."""

    min_queries: int
    tile: int  # tokens of one sequence that attend together
    chunk: int  # context tokens gathered at a time for one tile


# Small tiles waste less on short queries, large ones make better matrix products of long ones. A step that is too
# small for a tiling is compiled without it.
TILINGS = (_Tiling(2, 16, 32), _Tiling(129, 64, 128))


class _Options(NamedTuple):
    """What paged_attention's keywords say."""

    window: int | None
    soft_cap: float | None
    sinks: jax.Array | None  # [H]


class _Cache(NamedTuple):
    """One layer's, in the XLA layout."""

    keys: jax.Array  # [N, K, D, P]
    values: jax.Array | None  # [N, K, P, D]; None: they are the keys

    @property
    def block_size(self) -> int:
        return self.keys.shape[3]

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[1]


class _Softmax(NamedTuple):
    """Running softmax of one chunk after another. `...` stands for the leading axes of the queries."""

    maximum: jax.Array  # [..., 1]
    total: jax.Array  # [..., 1]
    weighted: jax.Array  # [..., D]


def paged_attention_xla(
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
) -> jax.Array:
    """See pallas_kernels.paged_attention.paged_attention. The caches are [N, K, D, P] and [N, K, P, D].

    v_cache is None where values are keys.
    """
    cache = _Cache(k_cache, v_cache)
    options = _Options(sliding_window, logit_soft_cap, sinks)
    q = q.astype(jnp.float32) * (scale * k_scale)  # narrower products are slower here than what it takes to widen
    query_lens = query_start_loc[1:] - query_start_loc[:-1]  # [S]
    out = jnp.zeros(q.shape, q.dtype)
    tilings = [tiling for tiling in TILINGS if tiling.min_queries <= q.shape[0]]
    ends = [tiling.min_queries for tiling in tilings[1:]] + [q.shape[0] + 1]
    for tiling, end in zip(tilings, ends, strict=True):
        tiled_lens = jnp.where((query_lens >= tiling.min_queries) & (query_lens < end), query_lens, 0)
        out = _prefill(out, q, cache, block_tables, seq_lens, query_start_loc, tiled_lens, tiling, options)
    first = query_start_loc[:-1]
    is_single = query_lens == 1
    decoded = _decode(q[first], cache, block_tables, jnp.where(is_single, seq_lens, 0), options)
    out = out.at[jnp.where(is_single, first, q.shape[0])].set(decoded, mode="drop")
    return out if v_scale == 1.0 else out * v_scale


def _decode(
    q: jax.Array,  # [S, H, D]
    cache: _Cache,
    block_tables: jax.Array,  # [S, B]
    seq_lens: jax.Array,  # [S], 0 where there is nothing to do
    options: _Options,
) -> jax.Array:
    """Attention of one scaled query a sequence, DECODE_GROUP sequences at a time, each group as far as its longest."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = cache.num_kv_heads
    tables, blocks_per_chunk, chunk_len = _pad_tables(block_tables, cache.block_size, DECODE_CHUNK)
    size = min(DECODE_GROUP, num_seqs)
    padding = -num_seqs % size
    tables, lens = jnp.pad(tables, ((0, padding), (0, 0))), jnp.pad(seq_lens, (0, padding))
    q = jnp.pad(q, ((0, padding), (0, 0), (0, 0))).reshape(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)

    def group(index: jax.Array, out: jax.Array) -> jax.Array:
        first = index * size
        queries = jax.lax.dynamic_slice_in_dim(q, first, size)  # [size, K, G, D]
        group_lens = jax.lax.dynamic_slice_in_dim(lens, first, size)
        starts = _window_starts(group_lens - 1, options.window)  # [size], first position that each query sees

        def step(chunk: jax.Array, state: _Softmax) -> _Softmax:
            ids = jax.lax.dynamic_slice(tables, (first, chunk * blocks_per_chunk), (size, blocks_per_chunk))
            k, v = _gather_context(cache, ids)  # [size, K, D, C], [size, K, C, D]
            scores = jnp.einsum("skgd,skdc->skgc", queries, k)
            scores = _capped(scores, options.soft_cap)
            context = chunk * chunk_len + jnp.arange(chunk_len)
            visible = context[None, :] < group_lens[:, None]  # [size, C]
            if options.window is not None:
                visible &= context[None, :] >= starts[:, None]
            return _softmax_step(state, scores, visible[:, None, None, :], "skgc,skcd->skgd", v)

        num_chunks = (jnp.max(group_lens) + chunk_len - 1) // chunk_len
        first_chunk = jnp.min(jnp.where(group_lens > 0, starts, jnp.max(starts))) // chunk_len
        sinks = _sinks_like(options.sinks, (num_kv_heads, num_heads // num_kv_heads, 1))
        state = jax.lax.fori_loop(first_chunk, num_chunks, step, _softmax_start(queries.shape, sinks))
        return jax.lax.dynamic_update_slice_in_dim(out, _softmax_end(state), first, axis=0)

    num_groups = q.shape[0] // size
    out = jax.lax.fori_loop(0, num_groups, group, jnp.zeros(q.shape, q.dtype))
    return out[:num_seqs].reshape(num_seqs, num_heads, head_dim)


def _prefill(
    out: jax.Array,  # [T, H, D]
    q: jax.Array,  # [T, H, D]
    cache: _Cache,
    block_tables: jax.Array,  # [S, B]
    seq_lens: jax.Array,  # [S]
    query_start_loc: jax.Array,  # [S + 1]
    query_lens: jax.Array,  # [S], 0 where there is nothing to do
    tiling: _Tiling,
    options: _Options,
) -> jax.Array:
    """Attention of sequences with several tokens, one tile after another. Returns `out` with their rows filled in."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, size = cache.num_kv_heads, tiling.tile
    tables, blocks_per_chunk, chunk_len = _pad_tables(block_tables, cache.block_size, tiling.chunk)
    num_tiles = (query_lens + size - 1) // size  # [S]
    last_tile = jnp.cumsum(num_tiles)
    grouped = (-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    q = jnp.pad(q, ((0, size), (0, 0), (0, 0))).reshape(grouped)  # the last tile may reach past the end
    offsets = jnp.arange(size)

    def tile(index: jax.Array, out: jax.Array) -> jax.Array:
        seq = jnp.sum(last_tile <= index)  # tiles before `index` belong to earlier sequences
        offset = (index - (last_tile[seq] - num_tiles[seq])) * size  # in the sequence's queries
        start = query_start_loc[seq] + offset
        position = seq_lens[seq] - query_lens[seq] + offset  # of the tile's first token in its sequence
        num_valid = jnp.minimum(query_lens[seq] - offset, size)
        queries = jax.lax.dynamic_slice_in_dim(q, start, size)  # [Q, K, G, D]
        context_len = position + num_valid
        starts = _window_starts(position + offsets, options.window)  # [Q], first position that each query sees

        def step(chunk: jax.Array, state: _Softmax) -> _Softmax:
            ids = jax.lax.dynamic_slice(tables, (seq, chunk * blocks_per_chunk), (1, blocks_per_chunk))[0]
            k, v = _gather_context(cache, ids)  # [K, D, C], [K, C, D]
            scores = jnp.einsum("qkgd,kdc->kgqc", queries, k)
            scores = _capped(scores, options.soft_cap)
            context = chunk * chunk_len + jnp.arange(chunk_len)
            visible = context[None, :] <= (position + offsets)[:, None]  # [Q, C]
            if options.window is not None:
                visible &= context[None, :] >= starts[:, None]
            return _softmax_step(state, scores, visible[None, None], "kgqc,kcd->kgqd", v)

        num_chunks = (context_len + chunk_len - 1) // chunk_len
        shape = (num_kv_heads, num_heads // num_kv_heads, size, head_dim)
        sinks = _sinks_like(options.sinks, (num_kv_heads, num_heads // num_kv_heads, 1, 1))
        state = jax.lax.fori_loop(starts[0] // chunk_len, num_chunks, step, _softmax_start(shape, sinks))
        result = _softmax_end(state).transpose(2, 0, 1, 3)  # [Q, K, G, D]
        before = jax.lax.dynamic_slice_in_dim(out, start, size)
        kept = jnp.where((offsets < num_valid)[:, None, None, None], result, before)
        return jax.lax.dynamic_update_slice_in_dim(out, kept, start, axis=0)

    out = jnp.pad(out, ((0, size), (0, 0), (0, 0))).reshape(grouped)
    out = jax.lax.fori_loop(0, last_tile[-1], tile, out)
    return out[:num_tokens].reshape(num_tokens, num_heads, head_dim)


def _gather_context(cache: _Cache, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys: [..., K, D, b * P] and values: [..., K, b * P, D] of blocks ids: [..., b], in float32."""
    *leading, num_blocks = ids.shape
    _, num_kv_heads, head_dim, block_size = cache.keys.shape
    k = jnp.moveaxis(_gather(cache.keys, ids), -4, -2)  # [..., K, D, b, P]
    k = k.reshape(*leading, num_kv_heads, head_dim, num_blocks * block_size)
    if cache.values is None:
        return k, _finite(jnp.swapaxes(k, -1, -2))
    v = jnp.moveaxis(_gather(cache.values, ids), -4, -3)  # [..., K, b, P, D]
    v = v.reshape(*leading, num_kv_heads, num_blocks * block_size, head_dim)
    return k, _finite(v) if jnp.issubdtype(float_of_bits(cache.values.dtype), jnp.floating) else v


def _gather(cache: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns blocks ids: [..., b] of cache: [N, ...] as [..., b, ...] in float32."""
    blocks = cache.reshape(cache.shape[0], -1).at[ids.astype(jnp.uint32)].get(mode="promise_in_bounds")
    if cache.dtype == jnp.uint16:  # bfloat16; quicker than to say so
        blocks = jax.lax.bitcast_convert_type(blocks.astype(jnp.uint32) << 16, jnp.float32)
    blocks = as_bits(blocks, float_of_bits(blocks.dtype))
    return blocks.reshape(*ids.shape, *cache.shape[1:]).astype(jnp.float32)


def _finite(values: jax.Array) -> jax.Array:
    """Returns values with 0 for what isn't finite: what lies past a sequence's end weighs 0, and 0 * NaN is NaN.

    A mask made from positions would do as well, but XLA:CPU doesn't vectorize a gather with one: half as fast.
    """
    return jnp.where(jnp.abs(values) < jnp.inf, values, 0)


def _pad_tables(block_tables: jax.Array, block_size: int, chunk_len: int) -> tuple[jax.Array, int, int]:
    """Widens the tables to whole chunks; returns them, the blocks a chunk and the tokens a chunk."""
    blocks_per_chunk = max(chunk_len // block_size, 1)
    padding = -block_tables.shape[1] % blocks_per_chunk
    return jnp.pad(block_tables, ((0, 0), (0, padding))), blocks_per_chunk, blocks_per_chunk * block_size


def _window_starts(positions: jax.Array, window: int | None) -> jax.Array:
    """Returns the first position that the query at each position sees."""
    return jnp.zeros_like(positions) if window is None else jnp.maximum(positions - (window - 1), 0)


def _capped(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _sinks_like(sinks: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    return None if sinks is None else sinks.astype(jnp.float32).reshape(shape)


def _softmax_start(shape: tuple[int, ...], sinks: jax.Array | None) -> _Softmax:
    """Starts empty, or with a logit without a value: sinks broadcastable to [..., 1]."""
    column = (*shape[:-1], 1)
    weighted = jnp.zeros(shape, jnp.float32)
    if sinks is not None:
        return _Softmax(jnp.broadcast_to(sinks, column), jnp.ones(column, jnp.float32), weighted)
    lowest = jnp.full(column, jnp.finfo(jnp.float32).min, jnp.float32)
    return _Softmax(lowest, jnp.zeros(column, jnp.float32), weighted)


def _softmax_step(state: _Softmax, scores: jax.Array, visible: jax.Array, einsum: str, values: jax.Array) -> _Softmax:
    """Adds one chunk: scores [..., C], visible broadcastable to it, values as the einsum says.

    A row that has seen nothing yet weighs everything alike; the first score that it sees wipes that out. A row that
    never sees anything must have zero values, or nobody may read it.
    """
    scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=-1, keepdims=True))
    shrink = _exp(state.maximum - maximum)
    weights = _exp(scores - maximum)
    weighted = jnp.einsum(einsum, weights, values)
    return _Softmax(
        maximum,
        state.total * shrink + jnp.sum(weights, axis=-1, keepdims=True),
        state.weighted * shrink + weighted,
    )


def _exp(x: jax.Array) -> jax.Array:
    """Returns e to the power of x: float32, at most 0; below -87.4 exactly 0.

    XLA:CPU doesn't vectorize its own in loops as small as these: it takes three to seven times longer. The polynomial
    is that of Cephes' expf.
    """
    x = jnp.maximum(x, -88.0)
    exponent = jnp.floor(x * 1.44269504 + 0.5)
    rest = x - exponent * 0.693359375 + exponent * 2.12194440e-4  # log 2 in two parts, the first of few bits
    value = jnp.full_like(x, 1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        value = value * rest + coefficient
    value = value * rest * rest + rest + 1
    power = jax.lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)
    return value * power


def _softmax_end(state: _Softmax) -> jax.Array:
    return state.weighted / jnp.where(state.total == 0, 1, state.total)
