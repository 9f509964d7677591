"""What is said, and refused, for each chip."""

from typing import NamedTuple

import jax.numpy as jnp
import pytest

from jaxllm.exceptions import ConfigError
from jaxllm.quantization import SCHEMES
from jaxllm.worker.number_formats import describe_formats


class FakeDevice(NamedTuple):
    platform: str
    device_kind: str
    compute_capability: str = ""


_CPU = FakeDevice("cpu", "cpu")
_V5E, _V5P = FakeDevice("tpu", "TPU v5 lite"), FakeDevice("tpu", "TPU v5")
_V4, _V6E, _V7X = FakeDevice("tpu", "TPU v4"), FakeDevice("tpu", "TPU v6 lite"), FakeDevice("tpu", "TPU7x")
_A100, _H100 = FakeDevice("gpu", "NVIDIA A100-SXM4-80GB", "8.0"), FakeDevice("gpu", "NVIDIA H100 80GB HBM3", "9.0")


def _lines(scheme, device, cache_dtype=jnp.float32):
    return list(describe_formats(SCHEMES.get(scheme), jnp.dtype(cache_dtype), device))


@pytest.mark.parametrize(
    "scheme, device, words",
    [
        ("int8", _CPU, "as cpu does natively"),
        ("int8", _V5E, "as TPU v5 lite does natively"),
        ("int8", _V6E, "natively"),
        ("int8", _A100, "natively"),
        ("int8", _V7X, "TPU7x has no products of int8: fp8 would be faster"),
        ("int8", _V4, "TPU v4 has no products of int8: int8_wo would be as fast and more exact"),
        ("fp8", _CPU, "emulated"),
        ("fp8", _V6E, "as TPU v6 lite does natively"),
        ("fp8", _V7X, "as TPU7x does natively"),
        ("fp8", _H100, "natively"),
        ("int8_wo", _V4, "widened on their way into products"),
        ("int4_wo", _V5E, "a scale every 128 inputs of each output"),
    ],
)
def test_each_choice_is_one_line(scheme, device, words):
    (line,) = _lines(scheme, device)
    assert line.startswith(f"quantization {scheme}: ") and words in line


@pytest.mark.parametrize("device", [_V4, _V5E, _V5P, _A100])
def test_fp8_is_refused_where_the_chip_has_none(device):
    with pytest.raises(ConfigError, match=rf"this is {device.device_kind}; set --quantization int8"):
        _lines("fp8", device)


def test_caches():
    assert _lines(None, _CPU) == []
    assert _lines(None, _CPU, jnp.bfloat16) == []
    assert "a scale for each dimension" in _lines(None, _V5E, jnp.int8)[0]
    assert "kept within +-448" in _lines(None, _V5E, jnp.float8_e4m3fn)[0]
