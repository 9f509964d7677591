"""Every GGUF architecture: the same weights and the same ModelConfig as from the Hugging Face folder."""

from dataclasses import replace

import numpy as np
import pytest

from jaxllm.model_loader.gguf_architectures import ARCHITECTURES
from jaxllm.model_loader.gguf_checkpoint import GGUFCheckpoint
from jaxllm.model_loader.hf_config import model_config_from_hf
from tests.fakes.gguf_families import write_gguf
from tests.fakes.golden_families import read_case

# (architecture, case of its golden models, fields of its config.json that GGUF can't say, or says of every such model)
CASES = [
    ("llama", "gqa", {}),
    ("llama", "linear_rope", {}),
    ("llama", "biases_mha", {}),
    ("qwen2", "biases", {"attention_bias": True}),
    ("qwen2", "tied_mqa", {"attention_bias": True}),
    ("qwen3", "head_norms", {}),
    ("qwen3", "tied_biases", {}),
    ("gemma2", "caps", {"query_pre_attn_scalar": 16}),
    ("gemma2", "no_caps", {"query_pre_attn_scalar": 12}),
    ("gemma3", "pattern", {"query_pre_attn_scalar": 16}),
    ("gemma3", "scaled_rope", {"query_pre_attn_scalar": 12}),
    ("phi3", "fused", {}),
    ("phi3", "window_tied", {}),
    ("phi3", "partial_rotary", {}),
    ("phi3", "long_rope", {}),
    ("gpt2", "plain", {"mlp_bias": True}),
    ("gpt2", "odd_head_dim", {"mlp_bias": True, "scale_attn_by_inverse_layer_idx": False}),
]


@pytest.mark.parametrize("architecture, name, fields", CASES, ids=["-".join(case[:2]) for case in CASES])
def test_reads_as_the_folder_does(architecture, name, fields, tmp_path):
    case = read_case(architecture, name)
    case = case._replace(config={**case.config, **fields})
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "tiny.gguf", architecture, case))

    assert sorted(checkpoint.tensor_names()) == sorted(case.tensors)
    for tensor_name, values in case.tensors.items():
        # A norm comes back from its distance to 1, so its last bit may differ.
        atol = 2e-7 if tensor_name.endswith("norm.weight") else 0
        np.testing.assert_allclose(checkpoint.read(tensor_name), values, rtol=0, atol=atol, err_msg=tensor_name)
    ours, theirs = model_config_from_hf(checkpoint.config), model_config_from_hf(case.config)
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)  # GGUF's numbers are float32
    assert _rounded(ours) == _rounded(replace(theirs, rms_norm_eps=ours.rms_norm_eps))


def _rounded(config):
    """Rounds what GGUF holds as float32, and drops what only GGUF says outright."""
    scaling = dict(config.rope_scaling or {})
    scaling.pop("attention_factor", None)
    scaling = {key: np.round(value, 5).tolist() if key != "rope_type" else value for key, value in scaling.items()}
    return replace(config, rope_scaling=scaling)


def test_every_architecture_is_covered():
    assert {architecture for architecture, _, _ in CASES} == set(ARCHITECTURES)


def test_longrope_keeps_the_magnitude_of_its_metadata(tmp_path):
    case = read_case("phi3", "long_rope")
    config = model_config_from_hf(GGUFCheckpoint(write_gguf(tmp_path / "tiny.gguf", "phi3", case)).config)
    assert config.rope_scaling["attention_factor"] == pytest.approx((1 + np.log(4) / np.log(16)) ** 0.5)


@pytest.mark.parametrize("architecture, num_layers", [("gemma2", 46), ("gemma3", 62)])
def test_the_27b_models_scale_by_the_hidden_size(architecture, num_layers, tmp_path):
    """The file says nothing of it; llama.cpp knows those models by their layers."""
    case = read_case(architecture, "caps" if architecture == "gemma2" else "pattern")
    one_layer = {
        name: values for name, values in case.tensors.items() if ".layers." not in name or ".layers.0." in name
    }
    tensors = {
        name.replace(".layers.0.", f".layers.{index}."): values
        for index in range(num_layers)
        for name, values in one_layer.items()
    }
    config = {**case.config, "num_hidden_layers": num_layers}
    path = write_gguf(tmp_path / "tiny.gguf", architecture, case._replace(config=config, tensors=tensors))
    extra = model_config_from_hf(GGUFCheckpoint(path).config).extra
    assert extra["query_pre_attn_scalar"] == 32 / 4  # hidden size by heads, not the head dimension 16
