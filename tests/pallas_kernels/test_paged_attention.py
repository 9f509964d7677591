"""The XLA paged attention and the reference against an oracle in numpy, over drawn batches with poisoned padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import paged_attention
from tests.fakes.attention_batches import AttentionBatch, attention_oracle, make_batch

_STATIC = ("scale", "sliding_window", "logit_soft_cap", "k_scale", "v_scale", "backend")
_attend_jit = jax.jit(paged_attention, static_argnames=_STATIC)

# (query length, context before it): none at all, decode, block edges, tile edges, several tiles and chunks.
_SEQUENCES = st.lists(
    st.sampled_from(
        [(0, 0), (1, 0), (1, 15), (1, 16), (1, 300), (2, 0), (16, 0), (63, 1), (64, 64), (65, 0), (130, 200)]
        + [(257, 0), (300, 77)]
    ),
    min_size=1,
    max_size=5,
)


def _attend(batch: AttentionBatch, *, backend: str, values_are_keys: bool = False, **options) -> np.ndarray:
    kv = batch.pack(backend, values_are_keys=values_are_keys)
    out = _attend_jit(batch.q, kv, *batch[3:], backend=backend, **options)
    return np.asarray(out, np.float32)[: batch.num_real]


@settings(max_examples=25)
@given(
    sequences=_SEQUENCES,
    block_size=st.sampled_from([1, 16, 128]),
    heads=st.sampled_from([(1, 1), (3, 3), (2, 4)]),
    head_dim=st.sampled_from([64, 80]),
    seed=st.integers(0, 100),
)
def test_xla_agrees_with_the_oracle(sequences, block_size, heads, head_dim, seed):
    # Padded alike: one compile for each combination of heads and blocks.
    shape = {"num_seqs": 7, "num_tokens": 1536, "table_width": 512 // block_size, "block_size": block_size}
    batch = make_batch(sequences, **shape, num_kv_heads=heads[0], group=heads[1], head_dim=head_dim, seed=seed)
    caches = np.full((2, 7 * shape["table_width"], *batch.k_cache.shape[1:]), np.nan, np.float32)
    caches[:, : len(batch.k_cache)] = batch.k_cache, batch.v_cache
    batch = batch._replace(k_cache=caches[0], v_cache=caches[1])
    out = _attend(batch, scale=head_dim**-0.5, backend="xla")
    np.testing.assert_allclose(out, attention_oracle(batch, scale=head_dim**-0.5), rtol=1e-5, atol=1e-5)


_MIXED = [(1, 0), (0, 0), (5, 30), (1, 31), (17, 0), (1, 32)]
_MIXED_SHAPE = {"num_seqs": 8, "num_tokens": 32, "table_width": 4, "block_size": 16, "head_dim": 16}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 1},
        {"sliding_window": 9},
        {"logit_soft_cap": 2.0},
        {"sinks": np.array([0.5, -2.0, 3.0, 0.0, 1.0, -30.0], np.float32)},
        {"k_scale": 0.5, "v_scale": 3.0},
        {
            "sliding_window": 20,
            "logit_soft_cap": 5.0,
            "sinks": np.linspace(-1, 1, 6, dtype=np.float32),
            "k_scale": 2.0,
            "v_scale": 0.25,
        },
    ],
    ids=lambda options: "+".join(options) or "plain",
)
@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_options_agree_with_the_oracle(options, backend):
    batch = make_batch(_MIXED, **_MIXED_SHAPE, num_kv_heads=2, group=3)
    out = _attend(batch, scale=0.3, backend=backend, **options)
    np.testing.assert_allclose(out, attention_oracle(batch, scale=0.3, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_an_int8_cache_is_read(backend):
    batch = make_batch(_MIXED, **_MIXED_SHAPE, num_kv_heads=2, group=1)
    k_cache, v_cache = (
        np.nan_to_num(cache * 40).round().clip(-128, 127).astype(np.int8) for cache in (batch.k_cache, batch.v_cache)
    )
    batch = batch._replace(k_cache=k_cache, v_cache=v_cache)
    options = {"scale": 0.25, "k_scale": 0.025, "v_scale": 0.5}
    out = _attend(batch, **options, backend=backend)
    np.testing.assert_allclose(out, attention_oracle(batch, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_values_may_be_keys(backend):
    batch = make_batch([*_MIXED, (20, 5)], **{**_MIXED_SHAPE, "num_tokens": 64}, num_kv_heads=1, group=4)
    out = _attend(batch, scale=0.3, backend=backend, values_are_keys=True)
    expected = attention_oracle(batch._replace(v_cache=batch.k_cache), scale=0.3)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_a_narrow_cache_of_floats_is_read(backend, dtype):
    batch = make_batch([*_MIXED, (20, 5)], **{**_MIXED_SHAPE, "num_tokens": 64}, num_kv_heads=2, group=3)
    batch = batch._replace(k_cache=np.asarray(batch.k_cache, dtype), v_cache=np.asarray(batch.v_cache, dtype))
    out = _attend(batch, scale=0.3, backend=backend)
    np.testing.assert_allclose(out, attention_oracle(batch, scale=0.3), rtol=1e-5, atol=1e-5)


def test_bfloat16_cache_agrees_with_the_oracle():
    shape = {"num_seqs": 3, "num_tokens": 128, "table_width": 5, "block_size": 16}
    batch = make_batch([(1, 40), (70, 3)], **shape, num_kv_heads=2, group=2, head_dim=64)
    batch = batch._replace(
        **{name: np.asarray(getattr(batch, name), jnp.bfloat16) for name in ("q", "k_cache", "v_cache")}
    )
    exact = attention_oracle(batch, scale=0.125)
    for backend in ("xla", "reference"):
        out = _attend_jit(batch.q, batch.pack(backend), *batch[3:], scale=0.125, backend=backend)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(out, np.float32)[: batch.num_real], exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_one_head_two_tokens_by_hand(backend):
    k_cache = np.zeros((3, 2, 1, 1), np.float32)
    v_cache = np.zeros((3, 2, 1, 1), np.float32)
    k_cache[2, :, 0, 0] = [0.0, np.log(3.0)]  # scores 0 and log 3: weights 1/4 and 3/4
    v_cache[2, :, 0, 0] = [10.0, 20.0]
    q = np.ones((2, 1, 1), np.float32)
    batch = AttentionBatch(q, k_cache, v_cache, np.array([[2, 0]]), np.array([2]), np.array([0, 2]))
    np.testing.assert_allclose(_attend(batch, scale=1.0, backend=backend).ravel(), [10.0, 17.5], rtol=1e-6)


def test_a_sink_takes_its_share_by_hand():
    q = np.ones((1, 1, 1), np.float32)
    k_cache, v_cache = np.zeros((2, 1, 1, 1), np.float32), np.full((2, 1, 1, 1), 8.0, np.float32)
    batch = AttentionBatch(q, k_cache, v_cache, np.array([[1]]), np.array([1]), np.array([0, 1]))
    sinks = np.log(np.array([3.0], np.float32))  # weights 1 : 3
    assert _attend(batch, scale=1.0, sinks=sinks, backend="reference").item() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((1, 3, 64))}, r"q \(1, 3, 64\) doesn't fit a KV cache of \(2, 2, 64, 16\) and"),
        ({"q": jnp.zeros((1, 4, 32))}, "doesn't fit"),
        ({"backend": "reference"}, "doesn't fit"),
        ({"backend": "tpu"}, "2 arrays .* not in the layout of backend tpu"),
        ({"backend": "cuda"}, "must be one of tpu, triton, xla, reference, got 'cuda'"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"logit_soft_cap": 0.0}, "logit_soft_cap must be positive"),
        ({"sinks": jnp.zeros(2)}, r"sinks must be one a query head, \[4\], got \(2,\)"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    kv = jnp.zeros((2, 2, 64, 16)), jnp.zeros((2, 2, 16, 64))
    arguments = {"q": jnp.zeros((1, 4, 64)), "backend": "xla", **change}
    q = arguments.pop("q")
    with pytest.raises(ValueError, match=message):
        metadata = jnp.zeros((1, 1), int), jnp.ones(1, int), jnp.array([0, 1])
        paged_attention(q, kv, *metadata, scale=1.0, **arguments)
