"""Checkpoints whose weights other tools quantized: what is loaded is what is stored, as numbers or as floats."""

import logging

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.config import ModelConfig
from jaxllm.exceptions import ConfigError, ModelLoadError, UnsupportedModelError
from jaxllm.model_loader.checkpoint import open_checkpoint
from jaxllm.model_loader.converter import convert
from jaxllm.model_loader.hf_config import model_config_from_hf
from jaxllm.quantization import Scheme
from tests.fakes.golden_families import read_case
from tests.fakes.loaded_weights import assert_equal, load_weights
from tests.fakes.packed_weights import WAYS, pack_mxfp4, write_packed

# Of each way: the dtype in memory, and groups of layer 0's qkv (32 inputs) and down (48), of which a group has 16.
_HELD = {
    "awq": ("int8", 2, 3),
    "gptq": ("int8", 2, 3),  # int4, which the CPU holds as int8
    "gptq v2": ("int8", 2, 3),
    "gptq act-order": ("float32", 0, 0),
    "gptq of 8 bits": ("int8", 2, 3),
    "gptq of 8 bits, asymmetric": ("float32", 0, 0),
    "int4": ("int8", 2, 3),
    "int4, asymmetric": ("int8", 2, 3),
    "int4 act-order": ("float32", 0, 0),
    "int8 packed": ("int8", 1, 1),
    "int8": ("int8", 1, 1),
    "int8, a scale each tensor": ("int8", 1, 1),
    "fp8": ("float8_e4m3fn", 1, 1),
    "fp8, a scale each tensor": ("float8_e4m3fn", 1, 1),
    "fp8 blocks": ("float8_e4m3fn", 2, 3),
    "fp8 blocks, compressed": ("float8_e4m3fn", 2, 3),
}


def _meant(weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Returns a weight [O, I] or [E, I, O] as floats."""
    values, scales = weights[name].astype(np.float32), weights.get(f"{name}_scale")
    if scales is None:
        return values
    if values.ndim == 2:
        return values * np.repeat(scales.T, values.shape[1] // len(scales), axis=1)
    return values * np.repeat(scales, values.shape[1] // scales.shape[1], axis=1)


def _same(packed: dict[str, np.ndarray], floats: dict[str, np.ndarray]) -> None:
    for name, values in floats.items():
        np.testing.assert_array_equal(_meant(packed, name), values, err_msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_loaded_is_what_is_stored(way, tmp_path, caplog):
    case = read_case("llama", "gqa")
    packed, floats = write_packed(tmp_path, case.config, case.tensors, WAYS[way])
    with caplog.at_level(logging.INFO, logger="jaxllm"):
        weights = load_weights(packed)
    _same(weights, load_weights(floats))
    dtype, *groups = _HELD[way]
    for name, num_groups in zip(("attention.qkv", "mlp.down"), groups, strict=True):
        assert weights[f"layers.0.{name}.weight"].dtype == dtype
        scales = weights.get(f"layers.0.{name}.weight_scale")
        assert (0 if scales is None else len(scales)) == num_groups
    assert ("de-quantised when it is loaded" in caplog.text) == (dtype == "float32")


@pytest.mark.parametrize("family, name", [("mixtral", "top_2"), ("deepseek_v3", "groups"), ("qwen2", "biases")])
def test_experts_heads_and_biases(family, name, tmp_path):
    """Deepseek's rows are reordered, and some of its matrices have no form but floats."""
    case = read_case(family, name)
    packed, floats = write_packed(
        tmp_path,
        case.config,
        case.tensors,
        WAYS["int8"],
        lambda name: name.endswith(("_proj.weight", "_with_mqa.weight", "w1.weight", "w2.weight", "w3.weight")),
    )
    weights = load_weights(packed)
    _same(weights, load_weights(floats))
    assert weights["layers.1.mlp.experts.down" if family != "qwen2" else "layers.1.mlp.down.weight"].dtype == np.int8


def test_gpt_oss_in_mxfp4(tmp_path):
    case = read_case("gpt_oss", "top_3_mqa")
    grown = {"down_proj": (4, 64, 32), "gate_up_proj": (4, 32, 128), "gate_up_proj_bias": (4, 128)}
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(grown.get(name.split(".")[-1], values.shape)).astype(np.float32)
        for name, values in case.tensors.items()
    }
    way = WAYS["awq"]._replace(config={"quant_method": "mxfp4"}, pack=pack_mxfp4)
    config = {**case.config, "intermediate_size": 64}
    packed, floats = write_packed(tmp_path, config, tensors, way, lambda name: name.endswith(("down_proj", "up_proj")))
    weights = load_weights(packed)
    _same(weights, load_weights(floats))
    assert weights["layers.0.mlp.experts.gate_up_scale"].shape == (4, 1, 128)


def test_a_layer_that_is_stored_in_two_ways_becomes_floats(tmp_path):
    case = read_case("llama", "gqa")
    packed, floats = write_packed(
        tmp_path,
        case.config,
        case.tensors,
        WAYS["int4"],
        lambda name: name.endswith(("q_proj.weight", "o_proj.weight")),
    )
    weights = load_weights(packed)
    _same(weights, load_weights(floats))
    assert weights["layers.0.attention.qkv.weight"].dtype == np.float32
    assert weights["layers.0.attention.out.weight"].dtype == np.int8


def test_another_scheme_may_be_asked_for(tmp_path):
    case = read_case("llama", "gqa")
    packed, floats = write_packed(tmp_path, case.config, case.tensors, WAYS["awq"])
    asked, made = load_weights(packed, quantization="int8"), load_weights(floats, quantization="int8")
    for name, values in made.items():
        np.testing.assert_array_equal(asked[name], values)


def test_biases_of_zeros_that_some_tools_add(tmp_path):
    case = read_case("llama", "gqa")
    name = "model.layers.0.self_attn.o_proj.bias"
    for value, is_idle in ((0.0, True), (0.5, False)):
        tensors = {**case.tensors, name: np.full(32, value, np.float32)}
        packed, _ = write_packed(tmp_path / str(value), case.config, tensors, WAYS["gptq"])
        if is_idle:
            assert "layers.0.attention.out.bias" not in load_weights(packed)
        else:
            with pytest.raises(ModelLoadError, match="o_proj.bias', which LlamaForCausalLM doesn't use"):
                load_weights(packed)


@pytest.mark.parametrize(
    "way, ending, change, message",
    [
        ("awq", ".qzeros", None, "lacks 'model.layers.0.self_attn.q_proj.qzeros'"),
        ("awq", ".qweight", lambda t: t[:8], "can't have 2 scales"),
        ("awq", ".scales", lambda t: t.astype(np.int32), "scales must be floats, got int32"),
        ("gptq", ".g_idx", lambda t: t + 7, r"must be in \[0, 2\)"),
        ("gptq", ".qzeros", lambda t: t + 1, "must have zero points of 8, as its config says that it is symmetric"),
        ("int4", ".weight_packed", lambda t: t.astype(np.float32), "must be int32 of two dimensions, got float32"),
        ("int4", ".weight_shape", lambda t: t[:1], "weight_shape must hold two sizes"),
        ("int4", ".weight_shape", lambda t: t * 2**40, "can't hold"),
        ("int4, asymmetric", ".weight_zero_point", lambda t: t[:, :1], "a zero point for each scale, got"),
        ("int8", ".weight", lambda t: t.astype(np.float32), "numbers must be int8 or float8_e4m3fn"),
        ("int8", ".weight", lambda t: t[:16], "can't be made of what is stored|must be numbers|is damaged"),
        ("int8", ".weight_scale", lambda t: t[:16], "32 outputs in blocks of 1 can't have 16 scales"),
    ],
)
def test_damage_is_named(way, ending, change, message, tmp_path):
    case = read_case("llama", "gqa")
    packed, _ = write_packed(tmp_path, case.config, case.tensors, WAYS[way])
    module, tensors = "model.layers.0.self_attn.q_proj", load_file(packed / "model.safetensors")
    whole = tensors.pop(module + ending)
    if change is not None:
        tensors[module + ending] = np.ascontiguousarray(change(whole))
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_weights(packed)
    assert "\n" not in str(caught.value)


def test_numbers_without_scales_are_refused(tmp_path):
    case = read_case("llama", "gqa")
    name = "model.norm.weight"
    tensors = {**case.tensors, name: case.tensors[name].astype(np.int8)}
    packed, _ = write_packed(tmp_path, case.config, tensors, WAYS["int8"])
    with pytest.raises(UnsupportedModelError, match="'model.norm.weight' is stored as int8, without the scales"):
        open_checkpoint(str(packed))


def test_a_converted_model_is_of_other_numbers(tmp_path):
    case = read_case("llama", "gqa")
    packed, _ = write_packed(tmp_path, case.config, case.tensors, WAYS["gptq"])
    with pytest.raises(ConfigError, match="its weights are stored as numbers, which are converted to others only"):
        convert(str(packed), tmp_path / "refused")
    convert(str(packed), tmp_path / "converted", quantization="int8_wo")
    assert_equal(load_weights(tmp_path / "converted"), load_weights(packed, quantization="int8_wo"))


def test_the_config_crosses_processes():
    config = {**read_case("llama", "gqa").config, "quantization_config": WAYS["int4"].config}
    model = model_config_from_hf(config)
    assert model.stored_scheme == Scheme("compressed-tensors", "int4", 16, False)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(model), type=ModelConfig) == model
