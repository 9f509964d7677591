"""Grouped matrix products against a loop in numpy, over drawn group sizes with poisoned rows past their sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul import GROUPED_MATMUL_BACKENDS, grouped_matmul

_multiply = jax.jit(grouped_matmul, static_argnames="backend")
NUM_ROWS, NUM_GROUPS = 100, 5


@pytest.mark.parametrize("backend", GROUPED_MATMUL_BACKENDS)
@settings(max_examples=30)
@given(sizes=st.lists(st.sampled_from([0, 0, 1, 7, 8, 9, 15, 16, 17, 20]), min_size=NUM_GROUPS, max_size=NUM_GROUPS))
def test_agrees_with_a_loop(backend, sizes):
    rng = np.random.default_rng(sum(sizes))
    rows = rng.standard_normal((NUM_ROWS, 6)).astype(np.float32)
    matrices = rng.standard_normal((NUM_GROUPS, 6, 4)).astype(np.float32)
    total = sum(sizes)
    rows[total:] = np.nan
    groups = np.repeat(np.arange(NUM_GROUPS), sizes)
    expected = np.array([rows[i] @ matrices[group] for i, group in enumerate(groups)]).reshape(total, 4)
    out = _multiply(rows, matrices, np.array(sizes, np.int32), backend=backend)
    np.testing.assert_allclose(out[:total], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", GROUPED_MATMUL_BACKENDS)
def test_by_hand(backend):
    rows = np.array([[1.0], [2.0], [3.0]], np.float32)
    matrices = np.array([[[10.0]], [[100.0]], [[1000.0]]], np.float32)
    out = _multiply(rows, matrices, np.array([2, 0, 1], np.int32), backend=backend)
    assert out.ravel().tolist() == [10.0, 20.0, 3000.0]


def test_accelerators_use_ragged_dot_to_the_same_end():
    rng = np.random.default_rng(0)
    rows, matrices = rng.standard_normal((9, 6)), rng.standard_normal((3, 6, 4))
    sizes = np.array([4, 0, 5], np.int32)
    arguments = jnp.array(rows, jnp.float32), jnp.array(matrices, jnp.float32), sizes
    lowered = jax.jit(grouped_matmul).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    assert "ragged_dot" in lowered
    np.testing.assert_allclose(jax.lax.ragged_dot(*arguments), _multiply(*arguments), rtol=1e-5, atol=1e-5)


def test_bfloat16_is_accumulated_in_float32():
    rows, matrices = jnp.ones((4, 1024), jnp.float32), jnp.full((1, 1024, 1), 1.0078125, jnp.bfloat16)
    out = _multiply(rows, matrices, np.array([4], np.int32))
    assert out.dtype == jnp.float32 and out.ravel().tolist() == [1032.0] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": jnp.zeros((3, 5))}, r"rows \(3, 5\) don't fit matrices \(2, 6, 4\)"),
        ({"group_sizes": jnp.zeros(3, jnp.int32)}, "group_sizes must be 2 integers"),
        ({"group_sizes": jnp.zeros(2)}, "group_sizes must be 2 integers, got float32"),
        ({"backend": "tpu"}, "backend must be one of xla, reference, got 'tpu'"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {"rows": jnp.zeros((3, 6)), "matrices": jnp.zeros((2, 6, 4)), "group_sizes": jnp.zeros(2, jnp.int32)}
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**{**arguments, **change})
