"""Every backend of the quantized product against the reference, and that against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.quantized_matmul import quantize_rows, quantize_weight, quantized_matmul
from pallas_kernels.quantized_matmul import tpu as tpu_kernel
from pallas_kernels.quantized_matmul.reference import quantized_matmul_reference
from pallas_kernels.quantized_matmul.tpu import quantized_matmul_tpu
from pallas_kernels.quantized_matmul.triton import quantized_matmul_triton
from pallas_kernels.quantized_matmul.xla import quantized_matmul_xla
from tests.fakes.tpu_interpreter import interpreted

# (how it is compiled, the kernel)
_BACKENDS = {
    "xla": (jax.jit, quantized_matmul_xla),
    "triton": (jax.jit, functools.partial(quantized_matmul_triton, interpret=True)),
    # Not the jitted one, which would keep what a test replaces.
    "tpu": (interpreted, quantized_matmul_tpu.__wrapped__),
}
# (weight dtype, inputs that share a scale, whether activations are quantized)
_FP8_SCHEMES = [(jnp.float8_e4m3fn, None, True), (jnp.float8_e4m3fn, None, False)]
_SCHEMES = [(jnp.int8, None, True), (jnp.int8, None, False), (jnp.int4, None, False), (jnp.int4, 64, False)]


def _draw(num_tokens, num_inputs, num_outputs, scheme, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((num_tokens, num_inputs)), dtype)
    weight = jnp.asarray(rng.standard_normal((num_outputs, num_inputs)) * num_inputs**-0.5, jnp.float32)
    return x, *quantize_weight(weight, scheme[0], scheme[1])


def _assert_agrees(backend, arguments, quantize_activations):
    options = {"quantize_activations": quantize_activations}
    compile_, kernel = _BACKENDS[backend]
    out = compile_(functools.partial(kernel, **options))(*arguments)
    expected = quantized_matmul_reference(*arguments, **options)
    tolerance = 1e-2 if arguments[0].dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(
        np.asarray(out, np.float32), np.asarray(expected), rtol=tolerance, atol=tolerance, err_msg=backend
    )


@pytest.mark.parametrize("backend", _BACKENDS)
@settings(max_examples=4)
@example(num_tokens=40, num_inputs=64, num_outputs=100, scheme=_SCHEMES[0], dtype=jnp.float32)
@example(num_tokens=40, num_inputs=64, num_outputs=100, scheme=_SCHEMES[1], dtype=jnp.float32)
@example(num_tokens=2, num_inputs=64, num_outputs=100, scheme=_SCHEMES[2], dtype=jnp.bfloat16)
@example(num_tokens=40, num_inputs=576, num_outputs=100, scheme=_SCHEMES[3], dtype=jnp.float32)
@given(
    num_tokens=st.sampled_from([1, 2, 17, 40, 140]),
    num_inputs=st.sampled_from([64, 576, 1024]),
    num_outputs=st.sampled_from([64, 100, 384]),
    scheme=st.sampled_from(_SCHEMES),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_backend_agrees_with_reference(backend, num_tokens, num_inputs, num_outputs, scheme, dtype):
    _assert_agrees(backend, _draw(num_tokens, num_inputs, num_outputs, scheme, dtype), scheme[2])


@pytest.mark.parametrize("scheme", _FP8_SCHEMES)
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_fp8_agrees_with_reference(scheme, num_tokens):
    arguments = _draw(num_tokens, 64, 100, scheme, jnp.float32)
    _assert_agrees("xla", arguments, scheme[2])
    chosen = quantized_matmul(*arguments, quantize_activations=scheme[2], backend="tpu")  # has no fp8 of its own
    np.testing.assert_allclose(
        chosen, quantized_matmul_reference(*arguments, quantize_activations=scheme[2]), 1e-5, 1e-5
    )


def test_tiles_of_every_axis_on_tpu(monkeypatch):
    monkeypatch.setattr(tpu_kernel, "_MAX_TOKENS", 32)
    monkeypatch.setattr(tpu_kernel, "_MAX_INPUTS", 256)
    monkeypatch.setattr(tpu_kernel, "_WEIGHT_TILE_BYTES", 256 * 128)
    for scheme in _SCHEMES:
        _assert_agrees("tpu", _draw(40, 512, 200, scheme, jnp.float32), scheme[2])


# Of three programs the last has as many steps as the others, or fewer.
@pytest.mark.parametrize("num_inputs", [1536, 1664])
def test_inputs_shared_by_several_programs_on_triton(num_inputs):
    _assert_agrees("triton", _draw(3, num_inputs, 64, _SCHEMES[0], jnp.float32), True)
    _assert_agrees("triton", _draw(3, num_inputs, 64, _SCHEMES[3], jnp.float32), False)


@pytest.mark.parametrize("backend", _BACKENDS)
def test_groups_that_take_several_steps(backend):
    _assert_agrees(backend, _draw(3, 576, 64, (jnp.int4, 192, False), jnp.float32), False)


def test_a_chip_without_int8_products_gets_the_same_result(monkeypatch):
    monkeypatch.setattr(tpu_kernel, "_multiplies_int8", lambda interpret: False)
    _assert_agrees("tpu", _draw(8, 256, 128, _SCHEMES[0], jnp.float32), True)


@pytest.mark.parametrize("scheme", _SCHEMES)
def test_reference_agrees_with_float64(scheme):
    x, weight, scales = _draw(5, 128, 32, scheme, jnp.float32)
    exact = np.asarray(weight, np.float64) * np.repeat(np.asarray(scales, np.float64).T, 128 // len(scales), axis=1)
    rows = np.asarray(x, np.float64)
    if scheme[2]:
        step = np.abs(rows).max(1, keepdims=True) / 127
        rows = np.round(rows / step) * step
    out = quantized_matmul(x, weight, scales, quantize_activations=scheme[2], backend="reference")
    np.testing.assert_allclose(np.asarray(out), rows @ exact.T, rtol=1e-5, atol=1e-5)


def test_weights_by_hand():
    values, scales = quantize_weight(jnp.array([[1.0, -0.4, 0.0, 14.0], [0.0, 0.0, 3.5, 7.0]]), jnp.int4, 2)
    assert np.asarray(values, np.int32).tolist() == [[7, -3, 0, 7], [0, 0, 4, 7]]
    np.testing.assert_allclose(np.asarray(scales), [[1 / 7, 1.0], [2.0, 1.0]])


def test_fp8_weights_by_hand():
    values, scales = quantize_weight(jnp.array([[896.0, -448.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]]), jnp.float8_e4m3fn)
    assert np.asarray(values, np.float32).tolist() == [[448, -224, 1, 0], [0, 0, 0, 0]]
    assert np.asarray(scales).tolist() == [[2.0, 1.0]]


def test_rows_by_hand():
    values, scales = quantize_rows(jnp.array([[127.0, -63.5, 1.0], [0.0, 0.0, 0.0]]))
    assert np.asarray(values).tolist() == [[127, -64, 1], [0, 0, 0]]
    assert np.asarray(scales).ravel().tolist() == [1.0, 1.0]


def test_product_by_hand():
    x, weight = jnp.array([[1.0, 2.0]], jnp.bfloat16), jnp.array([[3, 4], [-5, 6]], jnp.int8)
    out = quantized_matmul(x, weight, jnp.array([[10.0, 0.5]]), backend="xla")
    assert out.dtype == jnp.bfloat16
    assert np.asarray(out).tolist() == [[110.0, 3.5]]


@pytest.mark.parametrize(
    ("dtype", "scales", "quantize_activations", "message"),
    [
        (jnp.int16, (1, 8), False, "weight must be int8, int4 or float8_e4m3fn, got int16"),
        (jnp.int8, (1, 9), False, r"weight \(8, 64\) and scales \(1, 9\) don't fit"),
        (jnp.int8, (3, 8), False, "don't fit"),
        (jnp.int8, (2, 8), True, "needs an int8 or fp8 weight with one scale an output, got int8 with 2"),
        (jnp.int4, (1, 8), True, "got int4 with 1"),
    ],
)
def test_what_does_not_fit_is_refused(dtype, scales, quantize_activations, message):
    x, weight = jnp.zeros((2, 64)), jnp.zeros((8, 64), dtype)
    with pytest.raises(ValueError, match=message):
        quantized_matmul(x, weight, jnp.ones(scales), quantize_activations=quantize_activations, backend="xla")


def test_groups_that_do_not_divide_the_inputs_are_refused():
    with pytest.raises(ValueError, match="must divide the 64 inputs, got 48"):
        quantize_weight(jnp.ones((2, 64)), jnp.int4, 48)


def test_inputs_that_the_triton_kernel_cannot_cut_are_refused():
    with pytest.raises(ValueError, match="multiple of 32, got 100"):
        _assert_agrees("triton", _draw(2, 100, 64, _SCHEMES[1], jnp.float32), False)
