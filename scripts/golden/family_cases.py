"""The tiny models that each family is compared on: family -> case -> config fields. Plain data.

Together a family's cases cover what its configs may vary: grouped and single key-value heads, biases, tied and
untied embeddings, head dimensions that are no power of two, windows, rope scalings, experts.
"""

from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_theta": 10000.0,
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LINEAR = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.5}
_YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_WINDOWS_FROM_LAYER_1 = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
_GEMMA = {**_SIZES, "num_hidden_layers": 4, "sliding_window": 5, "query_pre_attn_scalar": 24}
_GPT2 = {"vocab_size": 72, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
_OPT = {name: value for name, value in _SIZES.items() if name not in ("intermediate_size", "num_key_value_heads")}
_OPT |= {"ffn_dim": 48, "word_embed_proj_dim": 32}
_DEEPSEEK = {
    **_SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
}

# family -> (config class of transformers, what its cases share, cases)
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "llama": (
        "LlamaConfig",
        _SIZES,
        {
            "gqa": {},
            "mqa_tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
            "biases_mha": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
            "odd_head_dim": {"head_dim": 6, "num_attention_heads": 8},
            "llama3_rope": {"head_dim": 16, "rope_parameters": _LLAMA3},
            "linear_rope": {"rope_parameters": _LINEAR},
            "yarn_rope": {"head_dim": 16, "rope_parameters": _YARN},
        },
    ),
    "mistral": (
        "MistralConfig",
        _SIZES,
        {
            "window": {"sliding_window": 5},
            "no_window": {"sliding_window": None, "head_dim": 12},
            "window_of_one": {"sliding_window": 1, "num_key_value_heads": 1, "tie_word_embeddings": True},
        },
    ),
    "qwen2": (
        "Qwen2Config",
        _SIZES,
        {
            "biases": {},
            "tied_mqa": {"tie_word_embeddings": True, "num_key_value_heads": 1},
            "windows": {**_WINDOWS_FROM_LAYER_1, "num_hidden_layers": 3},
        },
    ),
    "qwen3": (
        "Qwen3Config",
        _SIZES,
        {
            "head_norms": {"head_dim": 16},
            "tied_biases": {"head_dim": 12, "tie_word_embeddings": True, "attention_bias": True},
            "windows": {**_WINDOWS_FROM_LAYER_1, "head_dim": 8, "num_key_value_heads": 1},
        },
    ),
    "gemma2": (
        "Gemma2Config",
        _GEMMA,
        {
            "caps": {"head_dim": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
            "no_caps": {"head_dim": 12, "attn_logit_softcapping": None, "final_logit_softcapping": None,
                        "num_key_value_heads": 1},
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {**_GEMMA, "sliding_window_pattern": 3},
        {
            "pattern": {"head_dim": 16, "num_key_value_heads": 1},
            "scaled_rope": {"head_dim": 12, "attention_bias": True, "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        },
    ),
    "gpt2": (
        "GPT2Config",
        _GPT2,
        {
            "plain": {},
            "odd_head_dim": {"n_embd": 20, "n_inner": 44, "scale_attn_by_inverse_layer_idx": True},
            "untied_relu": {"tie_word_embeddings": False, "activation_function": "relu", "scale_attn_weights": False},
        },
    ),
    "opt": (
        "OPTConfig",
        _OPT,
        {
            "plain": {},
            "norm_after_and_projections": {"do_layer_norm_before": False, "word_embed_proj_dim": 20},
            "no_biases": {"enable_bias": False, "layer_norm_elementwise_affine": False, "num_attention_heads": 2},
            "untied_gelu": {"tie_word_embeddings": False, "activation_function": "gelu", "hidden_size": 36,
                            "word_embed_proj_dim": 36},
        },
    ),
    "phi3": (
        "Phi3Config",
        {**_SIZES, "original_max_position_embeddings": 64},
        {
            "fused": {},
            "window_tied": {"sliding_window": 5, "tie_word_embeddings": True, "num_key_value_heads": 1},
            "partial_rotary": {"num_attention_heads": 2, "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
            "long_rope": {"num_attention_heads": 2, "original_max_position_embeddings": 16,
                          "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0,
                                              "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
                                              "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 3.75, 4.0]}},
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        {**_SIZES, "num_hidden_layers": 4},
        {
            "every_second_without_rope": {"no_rope_layer_interval": 2, "tie_word_embeddings": True},
            "named_layers_biases": {"no_rope_layers": [1, 1, 0, 1], "attention_bias": True, "mlp_bias": True,
                                    "tie_word_embeddings": False, "num_key_value_heads": 1},
            "windows": {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": 5},
        },
    ),
    "olmo2": (
        "Olmo2Config",
        _SIZES,
        {
            "joint_head_norms": {},
            "mha_biases_tied": {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True},
        },
    ),
    "granite": (
        "GraniteConfig",
        {**_SIZES, "embedding_multiplier": 6.0, "logits_scaling": 2.5, "residual_multiplier": 0.3,
         "attention_multiplier": 0.2},
        {
            "multipliers": {},
            "tied_biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
                            "num_key_value_heads": 1},
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
        {
            "top_2": {},
            "top_1_window": {"num_experts_per_tok": 1, "sliding_window": 5, "num_key_value_heads": 1},
            "top_3_of_5": {"num_experts_per_tok": 3, "num_local_experts": 5, "head_dim": 12,
                           "tie_word_embeddings": True},
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_SIZES, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
        {
            "all_sparse": {"norm_topk_prob": True, "head_dim": 16},
            "every_second_sparse": {"decoder_sparse_step": 2, "num_hidden_layers": 3, "attention_bias": True,
                                    "num_key_value_heads": 1},
            "named_dense_layers": {"mlp_only_layers": [0], "num_experts_per_tok": 3, "tie_word_embeddings": True},
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "head_dim": 16,
         "intermediate_size": 40},
        {
            "sinks_windows_yarn": {"rope_parameters": {**_YARN, "truncate": False, "beta_fast": 32.0,
                                                        "beta_slow": 1.0}},
            "top_3_mqa": {"num_experts_per_tok": 3, "num_key_value_heads": 1, "num_hidden_layers": 3,
                          "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**_DEEPSEEK, "topk_method": "greedy", "norm_topk_prob": False},
        {
            "no_query_latent": {"q_lora_rank": None, "first_k_dense_replace": 1},
            "groups": {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2,
                       "routed_scaling_factor": 2.0, "num_hidden_layers": 3, "first_k_dense_replace": 2},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**_DEEPSEEK, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5},
        {
            "groups": {"first_k_dense_replace": 1},
            "yarn": {"first_k_dense_replace": 0, "q_lora_rank": None, "norm_topk_prob": False,
                     "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8}},
        },
    ),
}  # fmt: skip
