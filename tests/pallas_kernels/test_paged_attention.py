"""The XLA paged attention against the reference, over drawn batches with poisoned padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.reference import paged_attention_reference

_NUM_SEQS, _NUM_TOKENS = 7, 1024  # padded; one compile for each combination of heads and blocks
_attend = jax.jit(paged_attention, static_argnames=("scale",))

# (query length, context before it): none at all, decode, block edges, tile edges, several tiles and chunks.
_SEQUENCES = st.lists(
    st.sampled_from(
        [(0, 0), (1, 0), (1, 15), (1, 16), (1, 300), (2, 0), (16, 0), (63, 1), (64, 64), (65, 0), (130, 200)]
    ),
    min_size=1,
    max_size=5,
)


def _make_batch(sequences, block_size, num_kv_heads, group, head_dim, seed):
    """Draws a cache whose null block and free slots are NaN, and a batch with padding on every axis."""
    rng = np.random.default_rng(seed)
    num_seqs, table_width = _NUM_SEQS, 512 // block_size
    needed = [-(-(queries + before) // block_size) for queries, before in sequences]
    num_blocks = _NUM_SEQS * table_width
    caches = np.full((2, num_blocks, block_size, num_kv_heads, head_dim), np.nan, np.float32)
    ids = rng.permutation(np.arange(1, num_blocks))
    block_tables = np.zeros((num_seqs, table_width), np.int32)
    seq_lens = np.zeros(num_seqs, np.int32)
    query_lens = np.zeros(num_seqs, np.int32)
    for s, (queries, before) in enumerate(sequences):
        seq_lens[s], query_lens[s] = (queries + before if queries else 0), queries
        block_tables[s, : needed[s]], ids = ids[: needed[s]], ids[needed[s] :]
        for position in range(queries + before):
            block = block_tables[s, position // block_size]
            caches[:, block, position % block_size] = rng.standard_normal((2, num_kv_heads, head_dim))
    query_start_loc = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    q = rng.standard_normal((_NUM_TOKENS, num_kv_heads * group, head_dim)).astype(np.float32)
    q[query_start_loc[-1] :] = np.nan
    return q, caches[0], caches[1], block_tables, seq_lens, query_start_loc


@settings(max_examples=25, deadline=None)
@given(
    sequences=_SEQUENCES,
    block_size=st.sampled_from([1, 16, 128]),
    heads=st.sampled_from([(1, 1), (3, 3), (2, 4)]),
    head_dim=st.sampled_from([64, 80]),
    seed=st.integers(0, 100),
)
def test_agrees_with_reference(sequences, block_size, heads, head_dim, seed):
    batch = _make_batch(sequences, block_size, *heads, head_dim, seed)
    out = _attend(*batch, scale=head_dim**-0.5)
    expected = paged_attention_reference(*batch, scale=head_dim**-0.5)
    num_real = batch[-1][-1]
    np.testing.assert_allclose(np.asarray(out)[:num_real], expected[:num_real], rtol=1e-5, atol=1e-5)


def test_bfloat16_cache_agrees_with_reference():
    batch = list(_make_batch([(1, 40), (70, 3)], 16, 2, 2, 64, seed=0))
    for index in range(3):
        batch[index] = np.asarray(batch[index], jnp.bfloat16)
    out = _attend(*batch, scale=0.125)
    assert out.dtype == jnp.bfloat16
    expected = paged_attention_reference(*(np.asarray(a, np.float32) for a in batch[:3]), *batch[3:], scale=0.125)
    num_real = batch[-1][-1]
    np.testing.assert_allclose(np.asarray(out, np.float32)[:num_real], expected[:num_real], rtol=1e-2, atol=1e-2)


def test_one_head_two_tokens_by_hand():
    k_cache = np.zeros((3, 2, 1, 1), np.float32)
    v_cache = np.zeros((3, 2, 1, 1), np.float32)
    k_cache[2, :, 0, 0] = [0.0, np.log(3.0)]  # scores 0 and log 3: weights 1/4 and 3/4
    v_cache[2, :, 0, 0] = [10.0, 20.0]
    q = np.ones((2, 1, 1), np.float32)
    out = _attend(q, k_cache, v_cache, np.array([[2, 0]]), np.array([2]), np.array([0, 2]), scale=1.0)
    np.testing.assert_allclose(np.asarray(out).ravel(), [10.0, 17.5], rtol=1e-6)


def test_shapes_that_do_not_fit_are_refused():
    q = jnp.zeros((1, 3, 64))
    cache = jnp.zeros((2, 16, 2, 64))
    with pytest.raises(ValueError, match=r"q \(1, 3, 64\) doesn't fit k_cache \(2, 16, 2, 64\)"):
        paged_attention(q, cache, cache, jnp.zeros((1, 1), int), jnp.ones(1, int), jnp.array([0, 1]), scale=1.0)
