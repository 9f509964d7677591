"""What a quantization_config may say: formats that are read, formats that are refused by name, and nonsense."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.exceptions import ModelLoadError, UnsupportedModelError
from jaxllm.model_loader.stored_quantization import StoredFormat, stored_format, without_quantization
from jaxllm.quantization import Scheme
from tests.fakes.packed_weights import WAYS

_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}


def _groups(*weights, **more):
    groups = {f"group_{index}": {"targets": ["Linear"], "weights": each} for index, each in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, **more}


def _format(stored, architecture="LlamaForCausalLM"):
    return stored_format({"architectures": [architecture], "quantization_config": stored})


def test_formats_by_hand():
    assert stored_format({}) is None
    assert _format({"quant_method": "awq", "bits": 4}) == StoredFormat(
        "awq", Scheme("awq", "int8", 128, False), num_bits=4, group_size=128
    )
    assert _format(
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"}
    ) == StoredFormat("gptq", Scheme("gptq", "int4", None, False), num_bits=4)
    assert _format(_groups(_INT4)) == StoredFormat(
        "packed", Scheme("compressed-tensors", "int4", 64, False), num_bits=4, group_size=64
    )
    assert _format({"quant_method": "fp8", "weight_block_size": [128, 64]}) == StoredFormat(
        "blocks", Scheme("fp8", "float8_e4m3fn", 64, False), group_size=64, num_rows=128
    )
    assert _format({"quant_method": "mxfp4", "modules_to_not_convert": []}).scheme == Scheme("mxfp4", "int8", 32, False)


def test_its_name_of_2024():
    config = {"architectures": ["LlamaForCausalLM"], "compression_config": _groups(_INT4), "hidden_size": 8}
    assert stored_format(config) == _format(_groups(_INT4))
    assert without_quantization(config) == {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}


@pytest.mark.parametrize(
    "stored, message",
    [
        ({"quant_method": "bitsandbytes"}, "quantization 'bitsandbytes' is not read; awq, compressed-tensors"),
        ({"quant_method": "awq", "bits": 3}, "awq with bits 3 is not read; 4 are"),
        ({"quant_method": "awq", "version": "gemv"}, "awq with version 'gemv' is not read"),
        ({"quant_method": "gptq", "bits": 2}, "gptq with bits 2 is not read; 4 and 8 are"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not read"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 with fmt 'e5m2' is not read"),
        (_groups(_INT4, format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized' is not read"),
        (_groups(_INT4, {**_INT4, "num_bits": 8}), "config_groups that store weights in different ways"),
        (_groups(_INT4, sparsity_config={"format": "sparse-24-bitmask"}), "with sparsity_config"),
        (_groups(_INT4, transform_config={"config_groups": {"R1": {}}}), "with transform_config"),
        (_groups({**_INT4, "type": "float"}), "type 'float' is not read"),
    ],
)
def test_others_are_refused_by_name(stored, message):
    with pytest.raises(UnsupportedModelError, match=message):
        _format(stored)


def test_gpt2_is_refused():
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel is not read from quantized weights"):
        _format(WAYS["gptq"].config, "GPT2LMHeadModel")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**40) | st.sampled_from(["int", "float", "4x8", "-1x", "", "group"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["weights", "format"]), inner),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_nonsense_is_an_error_of_one_line(data):
    """One field of a good config, at any depth, becomes something else."""
    stored = data.draw(st.sampled_from([way.config for way in WAYS.values()]))
    changed = _with_one_changed(stored, data)
    try:
        _format(changed)
    except ModelLoadError as error:
        assert "\n" not in str(error) and len(str(error)) < 400


def _with_one_changed(value, data):
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(value)))
        return {**value, name: _with_one_changed(value[name], data)}
    return data.draw(_JSON)
