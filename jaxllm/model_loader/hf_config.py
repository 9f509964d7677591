"""Hugging Face config.json -> ModelConfig. Imports no jax, and believes no number it hasn't checked."""

import difflib
import math
from typing import Any

from jaxllm.config import ACTIVATIONS, LAYER_TYPES, ModelConfig
from jaxllm.exceptions import ConfigError, ModelLoadError, UnsupportedModelError
from jaxllm.model_loader.config_fields import boolean, integer, number, token_ids
from jaxllm.model_loader.family_configs import TRANSLATORS
from jaxllm.model_loader.stored_quantization import stored_format
from jaxllm.models.registry import FAMILIES

__all__ = ["model_config_from_hf", "token_ids"]
_DEFAULT_ROPE_TYPE = "default"
_ROPE_FIELDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
_ROPE_LISTS = ("short_factor", "long_factor")
_ROPE_NUMBERS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # may be missing


def model_config_from_hf(config: dict[str, Any]) -> ModelConfig:
    """Builds a ModelConfig from a config in Hugging Face's form, of transformers 4 or 5.

    Raises:
      UnsupportedModelError: The architecture, a variant that the config asks for, or a format of numbers isn't
        supported.
      ModelLoadError: A number is missing, not a number, or out of range.
    """
    architecture = _architecture(config)
    stored = stored_format(config)
    config = {**config, "extra": {}}
    if architecture in TRANSLATORS:
        config = TRANSLATORS[architecture](config)
    hidden_size = integer(config, "hidden_size")
    num_heads = integer(config, "num_attention_heads")
    rope_theta, rope_scaling, rotary_factor = _rope(config)
    bos_token_ids = token_ids(config, "bos_token_id")
    try:
        return ModelConfig(
            architecture=architecture,
            vocab_size=integer(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=integer(config, "intermediate_size"),
            num_hidden_layers=integer(config, "num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=integer(config, "num_key_value_heads", num_heads),
            head_dim=integer({"head_dim": hidden_size // num_heads} | _given(config, "head_dim"), "head_dim"),
            max_position_embeddings=integer(config, "max_position_embeddings"),
            rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            partial_rotary_factor=rotary_factor,
            tie_word_embeddings=boolean(config, "tie_word_embeddings"),
            attention_bias=boolean(config, "attention_bias"),
            mlp_bias=boolean(config, "mlp_bias"),
            hidden_act=_activation(config),
            sliding_window=_window(config),
            layer_types=_layer_types(config),
            has_latent_cache="latent_sizes" in config["extra"],
            bos_token_id=bos_token_ids[0] if bos_token_ids else None,
            eos_token_ids=token_ids(config, "eos_token_id"),
            extra=config["extra"],
            stored_scheme=stored.scheme if stored else None,
        )
    except ConfigError as error:
        raise ModelLoadError(f"the model's config is damaged: {error}") from error


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelLoadError(f"the model's config must list its architectures, got {names!r:.80}")
    if names[0] in FAMILIES:
        return names[0]
    nearest = difflib.get_close_matches(names[0][:80], FAMILIES, n=1, cutoff=0)[0]
    raise UnsupportedModelError(
        f"architecture {names[0]!r:.80} is not supported; supported: {', '.join(sorted(FAMILIES))}; "
        f"the nearest is {nearest}"
    )


def _given(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {} if config.get(name) is None else {name: config[name]}


def _activation(config: dict[str, Any]) -> str:
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(f"hidden_act must be one of {', '.join(ACTIVATIONS)}, got {activation!r:.80}")
    return activation


def _window(config: dict[str, Any]) -> int | None:
    return None if config.get("sliding_window") is None else integer(config, "sliding_window")


def _layer_types(config: dict[str, Any]) -> tuple[str, ...]:
    types = config.get("layer_types") or []
    if not isinstance(types, list) or not all(kind in LAYER_TYPES for kind in types):
        raise UnsupportedModelError(f"layer_types must be a list of {', '.join(LAYER_TYPES)}, got {types!r:.80}")
    return tuple(types)


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None, float]:
    """Returns (theta, scaling, share of each head): from rope_parameters (transformers 5), or the fields before it."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ModelLoadError(f"the model's rope parameters must be an object, got {parameters!r:.80}")
    scaling = dict(parameters)
    theta = number({"rope_theta": scaling.pop("rope_theta", config.get("rope_theta"))}, "rope_theta", 10000.0, low=1.0)
    rotated = scaling.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    factor = number({"partial_rotary_factor": rotated}, "partial_rotary_factor", 1.0)
    if factor > 1:
        raise ModelLoadError(f"the model's partial_rotary_factor must be at most 1, got {factor}")
    rope_type = scaling.pop("type", _DEFAULT_ROPE_TYPE)
    rope_type = scaling.pop("rope_type", rope_type)
    if not isinstance(rope_type, str):
        raise ModelLoadError(f"the model's rope_type must be a string, got {rope_type!r:.80}")
    if rope_type == _DEFAULT_ROPE_TYPE:
        return theta, None, factor
    if rope_type in ("yarn", "longrope"):
        trained_len = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        scaling.setdefault("original_max_position_embeddings", trained_len)
    _check_scaling(rope_type, scaling)
    return theta, {"rope_type": rope_type, **scaling}, factor


def _check_scaling(rope_type: str, scaling: dict[str, Any]) -> None:
    needed = _ROPE_FIELDS.get(rope_type, ())
    for name in needed:
        if isinstance(scaling.get(name), list) is not (name in _ROPE_LISTS) or scaling.get(name) is None:
            raise ModelLoadError(f"the model's rope scaling of kind {rope_type} needs {name}, got {scaling!r:.80}")
    for name, value in scaling.items():
        is_number = name in needed or name in _ROPE_NUMBERS
        for item in value if isinstance(value, list) and (name in _ROPE_LISTS or not is_number) else [value]:
            if is_number or type(item) in (int, float):
                number({name: item}, name, low=-math.inf if name.startswith("mscale") or not is_number else 0.0)
