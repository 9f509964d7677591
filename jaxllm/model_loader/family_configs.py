"""What each family's config.json says in words or with defaults of its own, said in Llama's. Imports no jax.

A family that isn't listed says it in Llama's words already. Each function takes the config of the checkpoint and
returns it with the common fields filled in; what only that family reads goes into "extra", checked.
"""

from collections.abc import Callable
from typing import Any

from jaxllm.exceptions import ModelLoadError, UnsupportedModelError
from jaxllm.model_loader.config_fields import boolean, integer, integers, number, optional_number

Config = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"


def _mistral(config: Config) -> Config:
    window = config.get("sliding_window", 4096)
    return {**config, "sliding_window": window, "layer_types": _all_layers(config, SLIDING if window else FULL)}


def _qwen(config: Config) -> Config:
    """Of Qwen 2 and 3: the first max_window_layers layers see everything."""
    if not boolean(config, "use_sliding_window") or config.get("sliding_window") is None:
        return {**config, "sliding_window": None, "layer_types": None}
    if config.get("layer_types") is not None:
        return config
    num_full = integer(config, "max_window_layers", 28, low=0)
    types = [SLIDING if index >= num_full else FULL for index in range(integer(config, "num_hidden_layers"))]
    return {**config, "layer_types": types}


def _qwen3(config: Config) -> Config:
    return _qwen({**config, "head_dim": config.get("head_dim") or 128})


def _gemma2(config: Config) -> Config:
    return _gemma({"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **config}, window_pattern=2)


def _gemma3(config: Config) -> Config:
    config = {**config}
    parameters = config.pop("rope_parameters", None) or {}  # of transformers 5: by kind of layer
    if not isinstance(parameters, dict):
        raise ModelLoadError(f"the model's rope_parameters must be an object, got {parameters!r:.80}")
    full, sliding = parameters.get(FULL) or {}, parameters.get(SLIDING) or {}
    if not isinstance(full, dict) or not isinstance(sliding, dict):
        raise ModelLoadError(f"the model's rope parameters must be objects, got {parameters!r:.80}")
    if sliding.get("rope_type", "default") != "default":
        raise UnsupportedModelError(f"the rope scaling of windowed layers must be 'default', got {sliding!r:.80}")
    theta, scaling = full.get("rope_theta", config.get("rope_theta")), full or config.get("rope_scaling") or {}
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    gemma = _gemma(config, window_pattern=integer({"sliding_window_pattern": pattern}, "sliding_window_pattern"))
    local = {"rope_local_base_freq": sliding.get("rope_theta", config.get("rope_local_base_freq"))}
    extra = {**gemma["extra"], "rope_local_base_freq": number(local, "rope_local_base_freq", 10000.0)}
    return {**gemma, "rope_scaling": {**scaling, "rope_theta": theta or 1e6}, "extra": extra}


def _gemma(config: Config, window_pattern: int) -> Config:
    """Of Gemma 2 and 3. Every window_pattern-th layer sees everything, the others a window."""
    if boolean(config, "use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention must be false: this is no causal language model")
    num_layers = integer(config, "num_hidden_layers")
    types = [SLIDING if (index + 1) % window_pattern else FULL for index in range(num_layers)]
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    return {
        **config,
        "head_dim": config.get("head_dim") or 256,
        "hidden_act": config.get("hidden_activation") or "gelu_pytorch_tanh",
        "tie_word_embeddings": boolean(config, "tie_word_embeddings", True),
        "sliding_window": config.get("sliding_window") or 4096,
        "layer_types": config.get("layer_types") or types,
        "extra": {
            "query_pre_attn_scalar": number(config, "query_pre_attn_scalar", 256.0),
            **{name: optional_number(config, name) for name in names},
        },
    }


def _gpt2(config: Config) -> Config:
    hidden_size = integer(config, "n_embd", 768)
    if boolean(config, "add_cross_attention"):
        raise UnsupportedModelError("add_cross_attention must be false: this is no plain decoder")
    return {
        **config,
        "hidden_size": hidden_size,
        "intermediate_size": integer(config, "n_inner", 4 * hidden_size),
        "num_hidden_layers": integer(config, "n_layer", 12),
        "num_attention_heads": integer(config, "n_head", 12),
        "max_position_embeddings": integer(config, "n_positions", 1024),
        "rms_norm_eps": number(config, "layer_norm_epsilon", 1e-5),
        "hidden_act": config.get("activation_function", "gelu_new"),
        "tie_word_embeddings": boolean(config, "tie_word_embeddings", True),
        "extra": {
            "scale_attn_weights": boolean(config, "scale_attn_weights", True),
            "scale_attn_by_inverse_layer_idx": boolean(config, "scale_attn_by_inverse_layer_idx"),
        },
    }


def _opt(config: Config) -> Config:
    is_norm_before = boolean(config, "do_layer_norm_before", True)
    return {
        **config,
        "intermediate_size": integer(config, "ffn_dim", 3072),
        "max_position_embeddings": integer(config, "max_position_embeddings", 2048),
        "rms_norm_eps": 1e-5,
        "hidden_act": config.get("activation_function", "relu"),
        "tie_word_embeddings": boolean(config, "tie_word_embeddings", True),
        "attention_bias": boolean(config, "enable_bias", True),
        "mlp_bias": boolean(config, "enable_bias", True),
        "extra": {
            "do_layer_norm_before": is_norm_before,
            "has_final_norm": is_norm_before and not boolean(config, "_remove_final_layer_norm"),
            "layer_norm_elementwise_affine": boolean(config, "layer_norm_elementwise_affine", True),
            "word_embed_proj_dim": integer(config, "word_embed_proj_dim", integer(config, "hidden_size")),
        },
    }


def _phi3(config: Config) -> Config:
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type") == "su":  # longrope's first name
        config = {**config, "rope_scaling": {**scaling, "type": "longrope"}}
    kind = SLIDING if config.get("sliding_window") else FULL
    return {**config, "rms_norm_eps": number(config, "rms_norm_eps", 1e-5), "layer_types": _all_layers(config, kind)}


def _smollm3(config: Config) -> Config:
    num_layers = integer(config, "num_hidden_layers")
    interval = integer(config, "no_rope_layer_interval", 4)
    has_rope = integers(config, "no_rope_layers", num_layers) or tuple(
        int((index + 1) % interval != 0) for index in range(num_layers)
    )
    types = config.get("layer_types")
    if not boolean(config, "use_sliding_window") or config.get("sliding_window") is None:
        types = None
    elif types is None:
        types = [FULL if rotated else SLIDING for rotated in has_rope]
    return {
        "rope_theta": 2000000.0,
        **config,
        "tie_word_embeddings": boolean(config, "tie_word_embeddings", True),
        "layer_types": types,
        "extra": {"rope_layers": has_rope},
    }


def _granite(config: Config) -> Config:
    names = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
    return {**config, "extra": {name: number(config, name, 1.0) for name in names}}


def _mixtral(config: Config) -> Config:
    kind = SLIDING if config.get("sliding_window") else FULL
    return {
        **config,
        "rms_norm_eps": number(config, "rms_norm_eps", 1e-5),
        "layer_types": _all_layers(config, kind),
        "extra": _experts(config, 8, 2),
    }


def _qwen3_moe(config: Config) -> Config:
    dense, num_layers = integers(config, "mlp_only_layers"), integer(config, "num_hidden_layers")
    step = integer(config, "decoder_sparse_step", 1)
    sparse = [index for index in range(num_layers) if index not in dense and (index + 1) % step == 0]
    extra = {
        **_experts(config, 128, 8),
        "moe_intermediate_size": integer(config, "moe_intermediate_size", 768),
        "norm_topk_prob": boolean(config, "norm_topk_prob"),
        "sparse_layers": frozenset(sparse),
    }
    # Unlike Qwen3Config, its own class has no default for head_dim.
    return {**_qwen(config), "head_dim": config.get("head_dim"), "extra": extra}


def _gpt_oss(config: Config) -> Config:
    types = [FULL if index % 2 else SLIDING for index in range(integer(config, "num_hidden_layers"))]
    return {
        **config,
        "head_dim": config.get("head_dim") or 64,
        "attention_bias": boolean(config, "attention_bias", True),
        "rms_norm_eps": number(config, "rms_norm_eps", 1e-5),
        "sliding_window": config.get("sliding_window") or 128,
        "layer_types": config.get("layer_types") or types,
        "extra": {
            **_experts(config, 128, 4),
            "swiglu_alpha": number(config, "swiglu_alpha", 1.702),
            "swiglu_limit": number(config, "swiglu_limit", 7.0),
        },
    }


def _deepseek_v2(config: Config) -> Config:
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModelError(f"topk_method must be greedy or group_limited_greedy, got {method!r:.80}")
    num_groups = integer(config, "n_group", 1) if method == "group_limited_greedy" else 1
    return _deepseek({**config, "n_group": num_groups, "norm_topk_prob": False}, num_shared=2, num_dense=0)


def _deepseek_v3(config: Config) -> Config:
    defaults = {"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    return _deepseek({**defaults, **config}, num_shared=1, num_dense=3)


def _deepseek(config: Config, num_shared: int, num_dense: int) -> Config:
    """Of DeepSeek V2 and V3. To the cache they look like models with one key-value head."""
    latent, rotated = integer(config, "kv_lora_rank", 512), integer(config, "qk_rope_head_dim", 64)
    num_groups, num_chosen_groups = integer(config, "n_group"), integer(config, "topk_group", 1)
    experts = _experts({**config, "num_local_experts": config.get("n_routed_experts")}, 256, 8)
    if experts["num_experts"] % num_groups or num_chosen_groups > num_groups:
        raise ModelLoadError(
            f"the model's {experts['num_experts']} experts must stand in equal groups, of which topk_group are chosen, "
            f"got n_group {num_groups} and topk_group {num_chosen_groups}"
        )
    return {
        **config,
        "num_key_value_heads": 1,
        "head_dim": latent + rotated,
        "extra": {
            **experts,
            "num_groups": num_groups,
            "num_chosen_groups": num_chosen_groups,
            "norm_topk_prob": boolean(config, "norm_topk_prob"),
            "routed_scaling_factor": number(config, "routed_scaling_factor", 1.0),
            "moe_intermediate_size": integer(config, "moe_intermediate_size"),
            "num_shared": integer(config, "n_shared_experts", num_shared),
            "num_dense": integer(config, "first_k_dense_replace", num_dense, low=0),
            "is_interleaved": boolean(config, "rope_interleave", True),
            "latent_sizes": {
                "query_latent": None if config.get("q_lora_rank") is None else integer(config, "q_lora_rank"),
                "latent": latent,
                "rotated": rotated,
                "unrotated": integer(config, "qk_nope_head_dim", 128),
                "value": integer(config, "v_head_dim", 128),
            },
        },
    }


def _experts(config: Config, num_experts: int, num_chosen: int) -> Config:
    """Returns the numbers of experts, in all and for each token; the arguments are the family's defaults."""
    named = {"num_experts": config.get("num_local_experts", config.get("num_experts"))}
    num_experts = integer(named, "num_experts", num_experts)
    num_chosen = integer(config, "num_experts_per_tok", num_chosen)
    if num_chosen > num_experts:
        raise ModelLoadError(f"the model's num_experts_per_tok must be at most {num_experts}, got {num_chosen}")
    return {"num_experts": num_experts, "num_experts_per_tok": num_chosen}


def _all_layers(config: Config, kind: str) -> list[str]:
    return [kind] * integer(config, "num_hidden_layers")


TRANSLATORS: dict[str, Callable[[Config], Config]] = {
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "GPT2LMHeadModel": _gpt2,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "GptOssForCausalLM": _gpt_oss,
    "GraniteForCausalLM": _granite,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "OPTForCausalLM": _opt,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "SmolLM3ForCausalLM": _smollm3,
}
