"""config.json as the hubs have it, of transformers 4 and older: what a family leaves out and calls otherwise."""

from typing import Any

import pytest

from jaxllm.config import ModelConfig
from jaxllm.exceptions import ModelLoadError, UnsupportedModelError
from jaxllm.model_loader.hf_config import model_config_from_hf

_SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def _read(architecture: str, **fields: Any) -> ModelConfig:
    return model_config_from_hf({**_SIZES, "architectures": [architecture], **fields})


def test_gpt2_of_the_hub() -> None:
    """openai-community/gpt2 has no tie_word_embeddings, no n_inner, and an n_ctx that nothing reads."""
    config = model_config_from_hf(
        {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
        }
    )
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (768, 3072, 12)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (12, 12, 64)
    assert (config.max_position_embeddings, config.rms_norm_eps, config.hidden_act) == (1024, 1e-5, "gelu_new")
    assert config.tie_word_embeddings


def test_opt_125m_of_the_hub() -> None:
    config = model_config_from_hf(
        {
            "_remove_final_layer_norm": False,
            "activation_function": "relu",
            "architectures": ["OPTForCausalLM"],
            "bos_token_id": 2,
            "do_layer_norm_before": True,
            "eos_token_id": 2,
            "ffn_dim": 3072,
            "hidden_size": 768,
            "max_position_embeddings": 2048,
            "model_type": "opt",
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "vocab_size": 50272,
            "word_embed_proj_dim": 768,
        }
    )
    assert (config.intermediate_size, config.head_dim, config.hidden_act) == (3072, 64, "relu")
    assert config.tie_word_embeddings and config.attention_bias and config.mlp_bias
    assert config.extra == {
        "do_layer_norm_before": True,
        "has_final_norm": True,
        "layer_norm_elementwise_affine": True,
        "word_embed_proj_dim": 768,
    }


def test_opt_350m_normalises_afterwards_and_has_no_last_norm() -> None:
    config = _read("OPTForCausalLM", do_layer_norm_before=False, word_embed_proj_dim=32)
    assert config.extra["has_final_norm"] is False
    assert config.extra["word_embed_proj_dim"] == 32


@pytest.mark.parametrize(
    "fields, window", [({}, 4096), ({"sliding_window": 128}, 128), ({"sliding_window": None}, None)]
)
def test_mistral_windows(fields: dict[str, Any], window: int | None) -> None:
    config = _read("MistralForCausalLM", **fields)
    assert [config.window(index) for index in range(4)] == [window] * 4


def test_qwen2_states_a_window_that_it_does_not_use() -> None:
    config = _read("Qwen2ForCausalLM", sliding_window=32768, max_window_layers=2, use_sliding_window=False)
    assert [config.window(index) for index in range(4)] == [None] * 4
    config = _read("Qwen2ForCausalLM", sliding_window=32, max_window_layers=2, use_sliding_window=True)
    assert [config.window(index) for index in range(4)] == [None, None, 32, 32]


def test_gemma3_of_transformers_4() -> None:
    config = _read(
        "Gemma3ForCausalLM",
        head_dim=16,
        hidden_activation="gelu_pytorch_tanh",
        num_hidden_layers=7,
        query_pre_attn_scalar=16,
        rope_local_base_freq=5000.0,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        rope_theta=500000.0,
        sliding_window=512,
        sliding_window_pattern=6,
    )
    assert config.layer_types == (SLIDING,) * 5 + (FULL, SLIDING)
    assert (config.rope_theta, config.rope_scaling) == (500000.0, {"rope_type": "linear", "factor": 8.0})
    assert (config.extra["rope_local_base_freq"], config.extra["query_pre_attn_scalar"]) == (5000.0, 16)
    assert config.tie_word_embeddings and config.hidden_act == "gelu_pytorch_tanh"


def test_gemma3_says_almost_nothing() -> None:
    config = _read("Gemma3ForCausalLM")
    assert (config.head_dim, config.rope_theta, config.sliding_window) == (256, 1e6, 4096)
    assert config.extra["attn_logit_softcapping"] is config.extra["final_logit_softcapping"] is None
    assert config.extra["rope_local_base_freq"] == 10000.0


def test_gemma2_caps_are_on_unless_they_are_null() -> None:
    assert _read("Gemma2ForCausalLM").extra["attn_logit_softcapping"] == 50.0
    assert _read("Gemma2ForCausalLM", attn_logit_softcapping=None).extra["attn_logit_softcapping"] is None
    assert _read("Gemma2ForCausalLM").layer_types == (SLIDING, FULL, SLIDING, FULL)


def test_phi3_mini_128k_of_transformers_4() -> None:
    """The trained length stands beside the scaling there, and longrope was once called su."""
    config = _read(
        "Phi3ForCausalLM",
        max_position_embeddings=1024,
        original_max_position_embeddings=256,
        rope_scaling={"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        sliding_window=128,
    )
    assert config.rope_scaling == {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 256,
    }
    assert config.window(0) == 128


def test_phi4_mini_rotates_three_quarters() -> None:
    config = _read("Phi3ForCausalLM", partial_rotary_factor=0.75)
    assert (config.head_dim, config.rotary_dim) == (16, 12)


def test_smollm3_leaves_every_fourth_layer_alone() -> None:
    config = _read("SmolLM3ForCausalLM")
    assert config.extra["rope_layers"] == (1, 1, 1, 0)
    assert config.rope_theta == 2000000.0 and config.tie_word_embeddings


def test_mixtral_and_qwen3_moe_count_experts_under_other_names() -> None:
    mixtral = _read("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=1)
    assert mixtral.extra == {"num_experts": 4, "num_experts_per_tok": 1}
    qwen = _read("Qwen3MoeForCausalLM", num_experts=6, num_experts_per_tok=2, mlp_only_layers=[1])
    assert qwen.extra["num_experts"] == 6
    assert qwen.extra["sparse_layers"] == frozenset({0, 2, 3})


def test_deepseek_v2_lite_has_no_groups() -> None:
    fields = {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "moe_intermediate_size": 32}
    config = _read("DeepseekV2ForCausalLM", **fields, kv_lora_rank=16, qk_rope_head_dim=8, n_routed_experts=4,
                   num_experts_per_tok=2)  # fmt: skip
    assert (config.num_key_value_heads, config.head_dim, config.has_latent_cache) == (1, 24, True)
    assert config.extra["num_groups"] == 1


@pytest.mark.parametrize(
    "architecture, fields, message",
    [
        ("GPT2LMHeadModel", {"n_head": 0}, "n_head must be an integer"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention must be false"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be false"),
        ("Gemma3ForCausalLM", {"rope_parameters": {FULL: 3}}, "rope parameters must be objects"),
        ("Gemma3ForCausalLM", {"rope_parameters": {SLIDING: {"rope_type": "yarn"}}}, "must be 'default'"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "sliding_window_pattern must be an integer"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be a finite number"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling must be a finite number above"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers must be a list of 4"),
        ("MixtralForCausalLM", {"num_local_experts": 2, "num_experts_per_tok": 3}, "must be at most 2, got 3"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method must be greedy or"),
        ("DeepseekV3ForCausalLM", {"n_routed_experts": 10, "n_group": 4}, "must stand in equal groups"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "needs long_factor"),
    ],
)
def test_what_is_refused(architecture: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ModelLoadError, UnsupportedModelError), match=message):
        _read(architecture, **fields)
