"""The sampler against an obvious one that sorts, and against the rules by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.layers import sampler
from jaxllm.layers.forward_batch import LogitEdits, SamplingBatch

_sample = jax.jit(sampler.sample)
_kept = jax.jit(sampler._kept_probs)


def _batch(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, positions=None):
    seeds = np.arange(rows) if seeds is None else np.asarray(seeds)
    halves = np.stack([np.zeros(rows), seeds], axis=1).astype(np.uint32)
    return SamplingBatch(
        logits_indices=jnp.zeros(rows, jnp.int32),
        temperature=jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), rows),
        top_k=jnp.broadcast_to(jnp.asarray(top_k, jnp.int32), rows),
        top_p=jnp.broadcast_to(jnp.asarray(top_p, jnp.float32), rows),
        min_p=jnp.broadcast_to(jnp.asarray(min_p, jnp.float32), rows),
        seeds=jnp.asarray(halves),
        positions=jnp.zeros(rows, jnp.int32) if positions is None else jnp.asarray(positions, jnp.int32),
    )


def _kept_by_sorting(logits, temperature, top_k, top_p, min_p):
    """Which tokens stay: min-p, then top-k, then top-p over what is left. No ties expected."""
    probs = np.exp((logits - logits.max()) / temperature)
    probs[probs < min_p] = 0
    order = np.argsort(-probs)
    if top_k:
        probs[order[top_k:]] = 0
    if top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= top_p * probs.sum()]] = 0
    return probs > 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 2000]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_keeps_what_sorting_keeps(seed, temperature, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).standard_normal((2, 1000)).astype(np.float32) * 3
    batch = _batch(2, temperature=[temperature, 1.0], top_k=[top_k, 0], top_p=[top_p, 1.0], min_p=[min_p, 0.0])
    kept = np.asarray(_kept(jnp.asarray(logits), batch)) > 0
    expected = _kept_by_sorting(logits[0].astype(np.float64), temperature, top_k, top_p, min_p)
    probs = np.exp((logits[0] - logits[0].max()) / temperature)
    differing = np.flatnonzero((kept[0] != expected) & (probs > 1e-30))  # below, float32 flushes to zero
    assert len(differing) <= (1 if 0 < top_p < 1 else 0), "only the token at the edge of top_p may differ by rounding"
    assert kept[0].any()
    assert kept[1].all()


def test_edges_of_top_p_top_k_and_min_p_by_hand():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]]))

    def kept(**params):
        return (np.asarray(_kept(logits, _batch(1, **params)))[0] > 0).tolist()

    assert kept(top_p=0.5) == [True, False, False, False]
    assert kept(top_p=0.51) == [True, True, False, False]
    assert kept(top_k=2) == [True, True, False, False]
    assert kept(top_k=3) == [True, True, True, True]  # a tie with the third stays
    assert kept(min_p=0.5) == [True, True, False, False]
    assert kept(top_k=2, top_p=0.6) == [True, False, False, False]  # 0.5 is two thirds of what top_k left


def test_greedy_takes_the_most_likely_and_ignores_the_seed():
    logits = jnp.array([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert np.asarray(_sample(logits, _batch(2, temperature=0.0))).tolist() == [1, 0]
    assert np.asarray(_sample(logits, _batch(2, temperature=[0.0, 1.0], top_k=[0, 1]))).tolist() == [1, 0]


def test_draws_follow_the_distribution():
    probs = np.array([0.5, 0.2, 0.0, 0.3])
    rows = 4000
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(probs, jnp.float32)), (rows, 4))
    tokens = np.asarray(_sample(logits, _batch(rows)))
    counts = np.bincount(tokens, minlength=4)
    assert counts[2] == 0
    # Pearson's statistic for 2 degrees of freedom passes 13.8 once in a thousand; the seeds are fixed.
    expected = rows * probs[probs > 0]
    assert ((counts[probs > 0] - expected) ** 2 / expected).sum() < 13.8


def test_draws_follow_the_distribution_over_many_blocks():
    """49,152 equally likely tokens: the mean of the drawn ids is the middle, and all blocks are reached."""
    rows = 600
    tokens = np.asarray(_sample(jnp.zeros((rows, 49152)), _batch(rows)))
    assert abs(tokens.mean() / 49152 - 0.5) < 4 * (1 / 12 / rows) ** 0.5
    assert len(np.unique(tokens // 256)) > 170  # of 192 blocks, 600 draws reach about 183


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((8, 5000)), jnp.float32)
    seeds, positions = rng.integers(0, 2**32, 8), rng.integers(0, 1000, 8)
    together = np.asarray(_sample(logits, _batch(8, seeds=seeds, positions=positions, top_p=0.95)))
    for row in range(8):
        alone = _sample(
            logits[row : row + 1],
            _batch(1, seeds=seeds[row : row + 1], positions=positions[row : row + 1], top_p=0.95),
        )
        assert int(alone[0]) == together[row]


def test_seed_and_position_both_change_the_draw():
    logits = jnp.zeros((64, 1000))
    by_position = np.asarray(_sample(logits, _batch(64, seeds=np.zeros(64), positions=np.arange(64))))
    by_seed = np.asarray(_sample(logits, _batch(64, seeds=np.arange(64))))
    assert len(set(by_position.tolist())) > 50
    assert len(set(by_seed.tolist())) > 50


def test_scores_are_log_softmax_with_ranks():
    logits = jnp.log(jnp.array([[0.1, 0.6, 0.3], [0.25, 0.25, 0.5]]))
    scored = sampler.score(logits, jnp.array([2, 1]), num_top=2)
    np.testing.assert_allclose(np.exp(scored.logprobs), [0.3, 0.25], rtol=1e-6)
    assert scored.ranks.tolist() == [2, 2]
    assert scored.top_token_ids.tolist() == [[1, 2], [2, 0]]
    np.testing.assert_allclose(np.exp(scored.top_logprobs), [[0.6, 0.3], [0.5, 0.25]], rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.sampled_from([5, 256, 257, 3000]), levels=st.sampled_from([3, 10**6]))
def test_blockwise_argmax_and_top_k_agree_with_the_plain_ones(seed, size, levels):
    """Few levels make many ties: of equal logits the lower id comes first."""
    logits = jnp.asarray(np.random.default_rng(seed).integers(0, levels, (3, size)), jnp.float32)
    assert sampler.argmax(logits).tolist() == jnp.argmax(logits, axis=-1).tolist()
    values, ids = sampler._top_k(logits, 5)
    expected, expected_ids = jax.lax.top_k(logits, 5)
    assert values.tolist() == expected.tolist()
    if levels > size:
        assert ids.tolist() == expected_ids.tolist()
    assert jnp.take_along_axis(logits, ids, axis=-1).tolist() == values.tolist()


def _edits(entries, restricted, num_rows):
    """Edits of (row, token, bias, divisor, penalty), with two of padding."""
    padded = [*entries, (num_rows, 0, 0, 1, 0), (num_rows, 0, 0, 1, 0)]
    rows, token_ids, *numbers = zip(*padded, strict=True)
    is_restricted = jnp.array([row in restricted for row in range(num_rows)])
    floats = [jnp.array(column, jnp.float32) for column in numbers]
    return LogitEdits(jnp.array(rows), jnp.array(token_ids), *floats, is_restricted)


def test_edits_change_single_logits_in_their_order():
    logits = jnp.array([[1.0, -1.0, 3.0, 0.5], [2.0, 0.0, -4.0, 1.0], [5.0, 6.0, 7.0, 8.0]])
    # 1.0 + 2 is positive: divided by 2, less 0.25. -1.0 is not: times 2. 3.0 is banned. 1.0 - 3 has changed its sign.
    entries = [(0, 0, 2, 2, 0.25), (0, 1, 0, 2, 0), (0, 2, -np.inf, 2, 1), (1, 3, -3, 2, 0)]
    first = _edits(entries[:2], (), 3)
    second = _edits(entries[2:], (), 3)
    edited = jax.jit(sampler.edit_logits)(logits, logits, first)
    edited = jax.jit(sampler.edit_logits)(logits, edited, second)
    expected = [[1.25, -2.0, -np.inf, 0.5], [2.0, 0.0, -4.0, -4.0], [5.0, 6.0, 7.0, 8.0]]
    assert edited.tolist() == expected
    assert sampler.sample(edited, _batch(3, temperature=0.0)).tolist() == [0, 0, 3]


def test_restricted_rows_keep_what_is_listed_in_any_call():
    logits = jnp.array([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
    edited = sampler.edit_logits(logits, logits, _edits([(1, 0, 0, 1, 0)], (1,), 2))
    edited = sampler.edit_logits(logits, edited, _edits([(1, 2, 0.5, 1, 0)], (), 2))
    assert edited.tolist() == [[1.0, 2.0, 3.0, 4.0], [1.0, -np.inf, 3.5, -np.inf]]
    draws = {int(sampler.sample(edited, _batch(2, seeds=[seed, seed]))[1]) for seed in range(30)}
    assert draws == {0, 2}
