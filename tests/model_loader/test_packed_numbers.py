"""Each format against what the tool that defines it reads; scripts/golden/packed_reference.py ran these tools."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxllm.model_loader.packed_numbers import LAYOUTS, unpacked
from jaxllm.model_loader.stored_quantization import StoredFormat
from tests.fakes.packed_weights import pack_rows

_GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "packed_weights.npz")
_FORMATS = {
    "packed int4": StoredFormat("packed", None, 4, 32),
    "packed int4 asymmetric": StoredFormat("packed", None, 4, 32),
    "packed int4 channel": StoredFormat("packed", None, 4),
    "packed int8": StoredFormat("packed", None, 8),
    "int8": StoredFormat("plain", None),
    "int8 asymmetric": StoredFormat("plain", None),
    "fp8": StoredFormat("plain", None),
    "awq": StoredFormat("awq", None, 4, 32),
    "gptq": StoredFormat("gptq", None, 4, 32, zero_offset=1),
    "gptq asymmetric": StoredFormat("gptq", None, 4, 32, zero_offset=1),
    "gptq act-order": StoredFormat("gptq", None, 4, 32, zero_offset=1),
    "gptq 8 bits": StoredFormat("gptq", None, 8, 32, zero_offset=1),
    "gptq 8 bits asymmetric": StoredFormat("gptq", None, 8, 32, zero_offset=1),
    "blocks": StoredFormat("blocks", None, group_size=32, num_rows=16),
    "mxfp4": StoredFormat("mxfp4", None, 4, 32),
}


def test_every_way_is_compared():
    assert {name.split("/")[0] for name in _GOLDEN.files} == set(_FORMATS)
    assert {form.layout for form in _FORMATS.values()} == set(LAYOUTS)


@pytest.mark.parametrize("way", _FORMATS)
def test_what_the_tool_reads_is_what_we_read(way):
    tensors = {name.split("/")[1]: _GOLDEN[name] for name in _GOLDEN.files if name.split("/")[0] == way}
    meant = tensors.pop("meant")
    if way in ("fp8", "blocks"):
        tensors[".weight"] = tensors[".weight"].view(ml_dtypes.float8_e4m3fn)
    form = _FORMATS[way]
    layout = LAYOUTS[form.layout]
    assert {layout.scales, *layout.needed} <= tensors.keys() <= {layout.scales, *layout.needed, *layout.others}
    numbers = layout.read(tensors, form)
    assert numbers.scales.dtype == np.float32 and len(set(meant.ravel().tolist())) > 16
    np.testing.assert_array_equal(numbers.dequantized(), meant)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([4, 8]).flatmap(lambda bits: st.tuples(st.just(bits), _numbers(bits))))
def test_words_come_apart_as_they_were_put_together(bits_and_numbers):
    bits, numbers = bits_and_numbers
    np.testing.assert_array_equal(unpacked(pack_rows(numbers, bits), bits), numbers)


def _numbers(bits):
    shapes = st.tuples(st.integers(1, 3), st.integers(1, 3)).map(lambda shape: (shape[0], shape[1] * 32 // bits))
    return arrays(np.uint8, shapes, elements=st.integers(0, 2**bits - 1))
