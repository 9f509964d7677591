"""The options of the XLA attention against the oracle: windows, soft caps, sinks; NaN before every window."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.xla import _exp
from tests.fakes.attention_batches import AttentionBatch, attention_oracle, make_batch

_attend = jax.jit(paged_attention, static_argnames=("scale", "sliding_window", "logit_soft_cap", "backend"))
_SINKS = np.array([0.5, -2.0, 3.0, 30.0, 1.0, -30.0], np.float32)
_SHAPE = {"num_seqs": 6, "num_tokens": 512, "table_width": 32, "block_size": 16, "head_dim": 16}
# (queries, tokens before them): decode short, long and at edges; one tile, several, and none.
_SEQUENCES = st.lists(
    st.sampled_from([(0, 0), (1, 0), (1, 15), (1, 16), (1, 300), (2, 0), (16, 50), (65, 0), (130, 200)]),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 20},
        {"sliding_window": 150},
        {"logit_soft_cap": 0.5},
        {"sinks": _SINKS},
        {"sliding_window": 33, "logit_soft_cap": 2.0, "sinks": _SINKS},
    ],
    ids=lambda options: "+".join(f"{name}{value if isinstance(value, int) else ''}" for name, value in options.items()),
)
@settings(max_examples=12)
@given(sequences=_SEQUENCES, seed=st.integers(0, 100))
def test_agrees_with_the_oracle(options, sequences, seed):
    batch = make_batch(sequences, **_SHAPE, num_kv_heads=2, group=3, seed=seed)
    expected = attention_oracle(batch, scale=0.3, **options)
    window = options.get("sliding_window")
    if window is not None:
        _poison_before_windows(batch, window)
    caches = np.full((2, 6 * _SHAPE["table_width"], *batch.k_cache.shape[1:]), np.nan, np.float32)  # one compile
    caches[:, : len(batch.k_cache)] = batch.k_cache, batch.v_cache
    kv = batch._replace(k_cache=caches[0], v_cache=caches[1]).pack("xla")
    out = _attend(batch.q, kv, *batch[3:], scale=0.3, backend="xla", **options)
    np.testing.assert_allclose(np.asarray(out)[: batch.num_real], expected, rtol=1e-5, atol=1e-5)


def _poison_before_windows(batch: AttentionBatch, window: int) -> None:
    """Overwrites with NaN what no query of its sequence sees any more."""
    block_size = batch.k_cache.shape[1]
    query_lens = np.diff(batch.query_start_loc)
    for seq, seq_len in enumerate(batch.seq_lens):
        first_seen = seq_len - query_lens[seq] - (window - 1)  # by the sequence's first query
        for position in range(max(first_seen, 0)):
            slot = batch.block_tables[seq, position // block_size], position % block_size
            batch.k_cache[slot] = batch.v_cache[slot] = np.nan


def test_a_sink_takes_its_share_by_hand():
    q = np.ones((2, 1, 1), np.float32)
    keys, values = np.zeros((2, 1, 1, 2), np.float32), np.full((2, 1, 2, 1), 8.0, np.float32)
    sinks = np.log(np.array([3.0], np.float32))  # against one token 1 : 3, against two 2 : 3
    metadata = np.array([[1]]), np.array([2]), np.array([0, 2])
    out = _attend(q, (keys, values), *metadata, scale=1.0, sinks=sinks, backend="xla")
    np.testing.assert_allclose(np.asarray(out).ravel(), [8 / 4, 16 / 5], rtol=1e-6)


def test_the_exponential_is_exact_to_a_rounding_and_ends_in_zero():
    """What is masked weighs nothing, whatever stands in its place: the smallest float32, and infinity."""
    x = -np.linspace(0, 87.3, 10_001, dtype=np.float32)
    np.testing.assert_allclose(jax.jit(_exp)(x), np.exp(x.astype(np.float64)), rtol=2e-7)
    lost = np.array([-87.4, -88, -1e4, np.finfo(np.float32).min, -np.inf], np.float32)
    assert np.asarray(_exp(lost)).tolist() == [0, 0, 0, 0, 0]
