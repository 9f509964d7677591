"""The Triton attention kernels in interpret mode against the reference, over drawn batches with poisoned padding."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import triton
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.triton import paged_attention_triton
from pallas_kernels.paged_attention.triton_tiling import decode_tiling, prefill_tiling
from tests.fakes.attention_batches import AttentionBatch, make_batch

_STATIC = ("scale", "sliding_window", "logit_soft_cap", "k_scale", "v_scale")
_attend = jax.jit(paged_attention_triton, static_argnames=(*_STATIC, "interpret"))
_reference = jax.jit(paged_attention_reference, static_argnames=_STATIC)
_NUM_SEQS, _NUM_TOKENS = 6, 192


class _Case(NamedTuple):
    """What is compiled once; hypothesis draws the sequences."""

    block_size: int
    heads: tuple[int, int]  # KV heads, query heads a KV head
    head_dim: int
    table_width: int  # with 512 tokens or more, decode splits its context
    q_dtype: Any = jnp.float32
    kv_dtype: Any = jnp.float32
    options: dict[str, Any] = {}
    has_sinks: bool = False


_CASES = {
    "plain": _Case(16, (2, 4), 64, table_width=40),
    "no splits, three heads a group": _Case(16, (3, 3), 64, table_width=20),
    "window": _Case(128, (2, 4), 128, table_width=8, options={"sliding_window": 20}),
    "odd block and head size, cap": _Case(48, (1, 8), 80, table_width=16, options={"logit_soft_cap": 2.0}),
    "one head a group, sinks": _Case(32, (2, 1), 96, table_width=20, has_sinks=True),
    "more heads than rows": _Case(64, (1, 70), 64, table_width=10, has_sinks=True, options={"sliding_window": 65}),
    "everything": _Case(
        256,
        (1, 2),
        256,
        table_width=4,
        has_sinks=True,
        options={"sliding_window": 100, "logit_soft_cap": 5.0, "k_scale": 0.5, "v_scale": 2.0},
    ),
    "bfloat16": _Case(16, (2, 4), 128, 40, q_dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16),
    "int8": _Case(16, (2, 4), 64, 40, kv_dtype=jnp.int8, options={"k_scale": 0.025, "v_scale": 0.03}),
    "float8_e4m3fn": _Case(16, (2, 2), 64, 20, kv_dtype=jnp.float8_e4m3fn, options={"k_scale": 2.0, "v_scale": 0.5}),
    "float8_e5m2": _Case(16, (1, 4), 64, 40, kv_dtype=jnp.float8_e5m2, has_sinks=True),
    "int8 under bfloat16": _Case(
        16, (2, 4), 64, 20, q_dtype=jnp.bfloat16, kv_dtype=jnp.int8, options={"k_scale": 0.025, "v_scale": 0.03}
    ),
}
_MAX_CONTEXT = 301
# (query length, context before it): none at all, decode, edges of blocks, chunks, splits and tiles, several tiles.
_SEQUENCES = st.lists(
    st.sampled_from(
        [(0, 0), (1, 0), (1, 15), (1, 16), (1, 255), (1, 256), (1, 300), (2, 0), (33, 1), (64, 64), (65, 0)]
    ),
    min_size=1,
    max_size=_NUM_SEQS,
).filter(lambda sequences: sum(queries for queries, _ in sequences) <= _NUM_TOKENS)


def _make_batch(case: _Case, sequences, seed: int) -> AttentionBatch:
    """Draws a batch in the case's dtypes. No block that lies before a window is in a table: those are given back."""
    batch = make_batch(
        sequences,
        num_seqs=_NUM_SEQS,
        num_tokens=_NUM_TOKENS,
        table_width=case.table_width,
        block_size=case.block_size,
        num_kv_heads=case.heads[0],
        group=case.heads[1],
        head_dim=case.head_dim,
        seed=seed,
    )
    if window := case.options.get("sliding_window"):
        for s, seq_len in enumerate(batch.seq_lens):
            first_query = seq_len - np.diff(batch.query_start_loc)[s]
            batch.block_tables[s, : max(first_query - window + 1, 0) // case.block_size] = 0
    caches = [_store(cache, case.kv_dtype) for cache in (batch.k_cache, batch.v_cache)]
    return batch._replace(q=jnp.asarray(batch.q, case.q_dtype), k_cache=caches[0], v_cache=caches[1])


def _store(cache: np.ndarray, dtype: Any) -> jax.Array:
    """Converts a cache, padded with NaN to a fixed number of blocks; integers have 127 for NaN."""
    num_blocks = _NUM_SEQS * -(-_MAX_CONTEXT // cache.shape[1]) + 2
    padding = [(0, num_blocks - len(cache)), *[(0, 0)] * 3]
    cache = np.pad(cache, padding, constant_values=np.nan)
    if dtype == jnp.int8:
        cache = np.nan_to_num(cache * 40, nan=127).round().clip(-128, 127)
    return jnp.asarray(cache, dtype)


@pytest.mark.parametrize("name", _CASES)
@settings(max_examples=6)
@given(data=st.data())
def test_agrees_with_reference(name, data):
    case = _CASES[name]
    batch = _make_batch(case, data.draw(_SEQUENCES), data.draw(st.integers(0, 100)))
    options = {"scale": case.head_dim**-0.5, **case.options}
    if case.has_sinks:
        options["sinks"] = jnp.linspace(-2, 3, batch.q.shape[1])
    out = _attend(*batch, interpret=True, **options)
    assert out.dtype == case.q_dtype
    expected = _reference(*batch, **options)
    tolerance = 1e-2 if case.q_dtype == jnp.bfloat16 else 1e-5
    real = slice(batch.num_real)
    np.testing.assert_allclose(
        np.asarray(out[real], np.float32), np.asarray(expected[real], np.float32), rtol=tolerance, atol=tolerance
    )


def test_a_wide_group_is_cut_into_tiles_of_heads():
    tiling = decode_tiling(70, 64, itemsize=4, num_seqs=6, num_kv_heads=1, max_context=640)
    assert (tiling.rows, tiling.heads, tiling.head_tiles, tiling.num_splits) == (64, 64, 2, 2)


def test_a_tile_of_queries_leaves_rows_over_if_heads_do_not_divide_them():
    tiling = prefill_tiling(3, 64, is_float32=False)
    assert (tiling.rows, tiling.heads, tiling.queries, tiling.head_tiles) == (128, 3, 42, 1)
    tiling = prefill_tiling(3, 64, is_float32=True)
    assert (tiling.rows, tiling.heads, tiling.queries, tiling.head_tiles) == (32, 3, 10, 1)


def test_rows_of_many_bytes_take_shorter_chunks():
    wide, narrow = (decode_tiling(2, 256, itemsize, 64, 8, 8192) for itemsize in (4, 2))
    assert [(tiling.chunk, tiling.num_warps) for tiling in (wide, narrow)] == [(16, 8), (32, 4)]


def _parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits float32 into two numbers of TF32, which has 10 bits behind the point."""

    def rounded(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
        return jax.lax.bitcast_convert_type((bits + 0x1000) & ~0x1FFF, jnp.float32)

    return rounded(x), rounded(x - rounded(x))


def test_the_three_products_of_tensor_cores_are_as_exact_as_float32(monkeypatch):
    """The interpreter makes float32 products as they are, a GPU makes them of parts without that of both small ones."""
    product = triton._dot

    def of_parts(left, right, axis, precision):
        (high, low), (other_high, other_low) = _parts(left), _parts(right)
        pairs = (low, other_high), (high, other_low), (high, other_high)
        return sum(product(*pair, axis, precision) for pair in pairs)

    monkeypatch.setattr(triton, "_dot", of_parts)
    case = _CASES["window"]
    batch = _make_batch(case, [(64, 64), (1, 300), (33, 1)], seed=3)
    options = {"scale": case.head_dim**-0.5, **case.options}
    out = jax.jit(lambda *arrays: paged_attention_triton(*arrays, interpret=True, **options))(*batch)
    real = slice(batch.num_real)
    np.testing.assert_allclose(out[real], _reference(*batch, **options)[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("num_seqs", "max_context", "num_splits"), [(1, 8192, 32), (8, 8192, 4), (8, 300, 1), (64, 8192, 1)]
)
def test_context_is_split_only_where_there_are_few_sequences(num_seqs, max_context, num_splits):
    assert decode_tiling(4, 128, 2, num_seqs, 8, max_context).num_splits == num_splits


def test_a_byte_cache_that_32_bits_cannot_address_is_refused():
    cache = jax.ShapeDtypeStruct((2**17 + 1, 16, 8, 128), jnp.int8)
    shapes = [((4, 8, 128), jnp.bfloat16), ((4, 8), jnp.int32), ((4,), jnp.int32), ((5,), jnp.int32)]
    q, *metadata = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    with pytest.raises(ValueError, match="int8 cache of 2147500032 elements can't be addressed"):
        jax.eval_shape(lambda *arrays: paged_attention_triton(*arrays, scale=1.0), q, cache, cache, *metadata)
