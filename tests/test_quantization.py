"""Weights into numbers and scales: written-out cases, and bounds on what is lost."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.quantization import SCHEMES, Scheme, dequantize, quantize, quantize_joined

_BY_OUTPUT = Scheme("test", "int8", None, True)
_GROUPS_OF_2 = Scheme("test", "int4", 2, False)


def test_a_scale_for_each_output():
    weight = np.array([[0.5, -1.0, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
    values, scales = quantize(weight, _BY_OUTPUT)
    assert values.dtype == np.int8
    assert values.tolist() == [[64, -127, 32, 0], [0, 0, 0, 0]]  # 63.5 and 31.75 round to even and up
    np.testing.assert_allclose(scales, [[1 / 127, 1.0]], rtol=1e-6)


def test_groups_of_inputs_have_their_own_scales():
    weight = np.array([[7.0, -3.0, 0.7, 0.1], [1.0, 14.0, 0.0, 0.0]], np.float32)
    values, scales = quantize(weight, _GROUPS_OF_2)
    assert values.dtype == ml_dtypes.int4
    assert values.astype(int).tolist() == [[-8, 3, -8, -1], [-1, -8, 0, 0]]
    np.testing.assert_allclose(scales, [[-0.875, -1.75], [-0.0875, 1.0]], rtol=1e-6)


def test_experts_are_stored_the_other_way_round():
    weight = np.array([[[7.0, 0.7], [-3.0, 0.1], [1.0, 0.0], [14.0, 0.0]]], np.float32)  # [E, I, O]
    values, scales = quantize(weight, _GROUPS_OF_2)
    assert values.astype(int).tolist() == [[[-8, -8], [3, -1], [-1, 0], [-8, 0]]]
    np.testing.assert_allclose(scales, [[[-0.875, -0.0875], [-1.75, 1.0]]], rtol=1e-6)


@pytest.mark.parametrize("num_inputs, num_groups", [(256, 2), (576, 9), (32, 1), (100, 1), (7, 1)])
def test_groups_that_dont_divide_the_inputs_shrink(num_inputs, num_groups):
    assert SCHEMES["int4_wo"].num_groups(num_inputs) == num_groups
    assert SCHEMES["int8"].num_groups(num_inputs) == 1


@settings(max_examples=40, deadline=None)
@given(
    scheme=st.sampled_from([scheme for scheme in SCHEMES.values() if scheme.rotated == 1] + [_BY_OUTPUT]),
    shape=st.sampled_from([(3, 8), (5, 256), (2, 6, 4), (1, 256, 3)]),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_lost_is_at_most_half_a_step(scheme, shape, dtype, seed):
    weight = (np.random.default_rng(seed).standard_normal(shape) * 10.0 ** (seed % 7 - 3)).astype(dtype)
    quantized = quantize(weight, scheme)
    error = np.abs(dequantize(quantized, scheme) - weight.astype(np.float32))
    size = shape[1] // quantized.scales.shape[-2]
    steps = np.abs(np.repeat(quantized.scales if len(shape) == 3 else quantized.scales.T, size, axis=1))
    if scheme.dtype_name == "float8_e4m3fn":  # three bits after the leading one; below 2**-6 steps of 2**-9
        bound = np.maximum(np.abs(weight.astype(np.float32)) / 16, steps * 2.0**-10)
    else:
        is_clipped = (quantized.values.astype(int) == 7) & (scheme.dtype_name == "int4")  # from up to 8
        bound = np.where(is_clipped, steps, steps / 2)
    assert np.all(error <= bound * 1.001)


def test_chunks_dont_show(monkeypatch):
    weight = np.random.default_rng(0).standard_normal((7, 16)).astype(np.float32)
    whole = quantize(weight, SCHEMES["int4_wo"])
    monkeypatch.setattr("jaxllm.quantization._CHUNK_ELEMENTS", 40)
    parts = quantize(weight, SCHEMES["int4_wo"])
    assert np.array_equal(whole.values, parts.values) and np.array_equal(whole.scales, parts.scales)


def test_joined_parts_are_the_whole(monkeypatch):
    weight = np.random.default_rng(0).standard_normal((9, 96)).astype(np.float32)
    monkeypatch.setattr("jaxllm.quantization._CHUNK_ELEMENTS", 200)
    for scheme in SCHEMES.values():
        whole, parts = quantize(weight, scheme), quantize_joined([weight[:4], weight[4:5], weight[5:]], scheme)
        assert np.array_equal(whole.values, parts.values) and np.array_equal(whole.scales, parts.scales)


def test_rotated_inputs_by_hand():
    weight = np.array([[3.0, 1.5, 0.0, 0.0, 0.0, 0.0]], np.float32)  # blocks of 2
    values, scales = quantize(weight, SCHEMES["int8"])
    assert values.tolist() == [[127, 42, 0, 0, 0, 0]]  # 4.5 and 1.5 over sqrt(2)
    np.testing.assert_allclose(scales, [[4.5 / 2**0.5 / 127]], rtol=1e-6)
    np.testing.assert_allclose(dequantize(quantize(weight, SCHEMES["int8"]), SCHEMES["int8"]), weight, atol=0.02)
