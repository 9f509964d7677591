import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxllm.exceptions import UnsupportedModelError
from jaxllm.layers.rope import Rope, make_rope, rope_frequencies, rotate


def test_rotation_by_hand():
    """A quarter turn a position: (1, 0) -> (0, 1) -> (-1, 0), first half against second half of the head."""
    frequencies = (math.pi / 2, 0.0)
    x = jnp.broadcast_to(jnp.array([1.0, 5.0, 0.0, 6.0]), (3, 1, 4))
    out = np.asarray(rotate(x, jnp.arange(3), frequencies))[:, 0]
    np.testing.assert_allclose(out, [[1, 5, 0, 6], [0, 5, 1, 6], [-1, 5, 0, 6]], atol=1e-6)


def test_frequencies_by_hand():
    np.testing.assert_allclose(rope_frequencies(4, 10000.0, None), [1.0, 0.01], rtol=1e-6)
    linear = {"rope_type": "linear", "factor": 4.0}
    np.testing.assert_allclose(rope_frequencies(4, 10000.0, linear), [0.25, 0.0025], rtol=1e-6)


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = rope_frequencies(128, 500000.0, None)
    scaled = rope_frequencies(128, 500000.0, scaling)
    turns = 8192 * plain / (2 * math.pi)
    np.testing.assert_allclose(scaled[turns > 4], plain[turns > 4])
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
    middle = int(np.flatnonzero((turns > 1) & (turns < 4))[0])
    share = (turns[middle] - 1) / 3  # transformers: (1 - share) * f / factor + share * f
    assert scaled[middle] == pytest.approx((1 - share) * plain[middle] / 8 + share * plain[middle], rel=1e-6)


def test_a_part_of_each_head_is_rotated_and_the_rest_passes():
    rope = Rope((math.pi / 2,), magnitude=3.0)
    x = jnp.array([[[1.0, 0.0, 5.0]]])
    np.testing.assert_allclose(rope(x, jnp.array([1]))[0, 0], [0, 3, 5], atol=1e-6)


def test_yarn_by_hand():
    """With theta = 10000 over 8 elements, waves of 32 turns and of 1 turn stand between pairs 0 and 1, and at 2.2."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    rope = make_rope(8, 10000.0, scaling)
    # low = floor(4 ln(1024 / 64π) / ln 10000) = 0, high = ceil(4 ln(1024 / 2π) / ln 10000) = 3
    shares = np.array([0, 1, 2, 3]) / 3
    expected = np.array([1, 0.1, 0.01, 0.001]) * (1 - shares + shares / 4)
    np.testing.assert_allclose(rope.frequencies, expected, rtol=1e-6)
    assert rope.magnitude == pytest.approx(0.1 * math.log(4) + 1)
    assert make_rope(8, 10000.0, {**scaling, "attention_factor": 1.5}).magnitude == 1.5
    assert make_rope(8, 10000.0, {**scaling, "mscale": 1.0, "mscale_all_dim": 1.0}).magnitude == 1.0


def test_unknown_scaling_is_named():
    with pytest.raises(UnsupportedModelError, match="rope scaling 'x' is not supported; supported: default, linear"):
        rope_frequencies(4, 10000.0, {"type": "x"})


def test_how_far_elements_reach_by_hand():
    x = jnp.array([3.0, 0.0, -4.0, 2.0, -7.0])  # pairs (3, -4) and (0, 2), and one that isn't rotated
    assert Rope((0.5, 0.1)).reach(x).tolist() == [5.0, 2.0, 5.0, 2.0, 7.0]


@settings(max_examples=30, deadline=None)
@given(
    x=arrays(np.float32, (1, 1, 6), elements=st.floats(-100, 100, width=32)),
    positions=st.tuples(*[st.integers(0, 10**5)] * 2),
)
def test_no_position_reaches_further_and_some_does(x, positions):
    """What one position shows bounds every other; turned by angles all around, each element comes up to its bound."""
    rope = make_rope(4, 10000.0, None)
    here, there = (rope(jnp.asarray(x), jnp.array([position], jnp.int32)) for position in positions)
    reach = np.asarray(rope.reach(here))
    assert np.all(np.abs(there) <= reach * 1.0001 + 1e-5)
    around = Rope((2 * np.pi / 1000,) * 2)(jnp.repeat(jnp.asarray(x), 1000, axis=0), jnp.arange(1000, dtype=jnp.int32))
    np.testing.assert_allclose(np.abs(around).max(axis=0), reach[0], rtol=1e-3, atol=1e-4)
