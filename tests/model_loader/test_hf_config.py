"""config.json -> ModelConfig."""

import math
from typing import Any

import pytest

from jaxllm.config import ACTIVATIONS
from jaxllm.exceptions import ModelLoadError, UnsupportedModelError
from jaxllm.layers import mlp
from jaxllm.model_loader.hf_config import model_config_from_hf
from jaxllm.models.registry import FAMILIES

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _config(**overrides: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        **overrides,
    }


def test_defaults() -> None:
    config = model_config_from_hf(_config())
    assert (config.num_key_value_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.rope_theta, config.rope_scaling, config.tie_word_embeddings) == (10000.0, None, False)
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


@pytest.mark.parametrize("ids, expected", [(None, ()), (2, (2,)), ([2, 0], (2, 0)), ([], ())])
def test_eos_ids(ids: Any, expected: tuple[int, ...]) -> None:
    assert model_config_from_hf(_config(eos_token_id=ids)).eos_token_ids == expected


@pytest.mark.parametrize(
    "fields, theta, scaling",
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, 5e5,
         {"rope_type": "linear", "factor": 2.0}),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 5e5,
         {"rope_type": "llama3", **LLAMA3}),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6, None),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3", **LLAMA3}}, 1e6,
         {"rope_type": "llama3", **LLAMA3}),
    ],
)  # fmt: skip
def test_rope_of_transformers_4_and_5(fields: dict[str, Any], theta: float, scaling: dict[str, Any] | None) -> None:
    config = model_config_from_hf(_config(**fields))
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    "field, value",
    [
        ("vocab_size", 0),
        ("vocab_size", -1),
        ("vocab_size", 1.5),
        ("vocab_size", True),
        ("vocab_size", "100"),
        ("vocab_size", None),
        ("vocab_size", 2**31),
        ("hidden_size", math.nan),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 0),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", math.inf),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", 10**400),
        ("rope_theta", -1.0),
        ("rope_theta", "10000"),
        ("rope_scaling", [1]),
        ("rope_scaling", {"type": 3}),
        ("rope_scaling", {"type": "linear", "factor": math.nan}),
        ("rope_scaling", {"type": "longrope", "short_factor": [1.0, math.inf]}),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", -1),
        ("eos_token_id", [1, "2"]),
        ("eos_token_id", {"a": 1}),
        ("bos_token_id", 1.0),
        ("architectures", []),
        ("architectures", None),
        ("architectures", [7]),
        ("partial_rotary_factor", 1.5),
        ("partial_rotary_factor", 0),
        ("rope_scaling", {"type": "linear"}),
        ("rope_scaling", {"type": "llama3", "factor": 8.0}),
        ("hidden_act", "tanh"),
        ("layer_types", ["sliding_attention"]),
        ("layer_types", ["linear_attention", "full_attention"]),
        ("sliding_window", 0),
        ("quantization_config", {"quant_method": "bitsandbytes"}),
        ("quantization_config", {"quant_method": "gptq", "bits": 3}),
        ("quantization_config", [1]),
    ],
)
def test_bad_fields(field: str, value: Any) -> None:
    with pytest.raises(ModelLoadError) as caught:
        model_config_from_hf(_config(**{field: value}))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_the_field_is_named() -> None:
    with pytest.raises(
        ModelLoadError, match=r"the model's hidden_size must be an integer in \[1, 2147483647\], got -1"
    ):
        model_config_from_hf(_config(hidden_size=-1))


def test_other_architectures() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        model_config_from_hf(_config(architectures=["LLaMAForCausalLM"]))
    assert str(caught.value) == (
        f"architecture 'LLaMAForCausalLM' is not supported; supported: {', '.join(sorted(FAMILIES))}; "
        "the nearest is LlamaForCausalLM"
    )


def test_every_activation_can_be_run() -> None:
    assert set(mlp.ACTIVATIONS) == set(ACTIVATIONS)
