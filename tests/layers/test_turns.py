import math

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.layers.rope import rope_frequencies
from jaxllm.layers.turns import cos_sin


def test_quarter_turns_by_hand():
    cos, sin = cos_sin(jnp.arange(5), [math.pi / 2])
    np.testing.assert_allclose(cos[:, 0], [1, 0, -1, 0, 1], atol=1e-7)
    np.testing.assert_allclose(sin[:, 0], [0, 1, 0, -1, 0], atol=1e-7)


@given(
    st.lists(st.integers(0, 1_000_000), min_size=6, max_size=6),
    st.lists(st.floats(0, 6.2), min_size=3, max_size=3),
)
def test_as_float64_says(positions, frequencies):
    """Every quarter of a turn, whole turns, and positions far beyond any context."""
    cos, sin = cos_sin(jnp.array(positions, jnp.int32), frequencies)
    angles = np.array(positions, np.float64)[:, None] * np.array(frequencies)
    bounds = 2e-7 + np.array(positions)[:, None] * 7.4e-10
    assert (np.abs(np.asarray(cos, np.float64) - np.cos(angles)) <= bounds).all()
    assert (np.abs(np.asarray(sin, np.float64) - np.sin(angles)) <= bounds).all()


def test_a_models_angles_all_round_the_turn():
    frequencies = rope_frequencies(64, 10000.0, None).astype(np.float64)
    positions = np.arange(0, 8192, 7)
    cos, sin = cos_sin(jnp.asarray(positions, jnp.int32), frequencies)
    angles = positions[:, None] * frequencies
    np.testing.assert_allclose(cos, np.cos(angles), atol=7e-6)
    np.testing.assert_allclose(sin, np.sin(angles), atol=7e-6)
