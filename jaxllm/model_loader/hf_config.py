"""Hugging Face config.json -> ModelConfig. Imports no jax, and believes no number it hasn't checked."""

import difflib
import math
from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.exceptions import ConfigError, ModelLoadError, UnsupportedModelError
from jaxllm.models.registry import FAMILIES

_INT_MAX = 2**31 - 1
_FLOAT_MAX = 1e38
_DEFAULT_ROPE_TYPE = "default"


def model_config_from_hf(config: dict[str, Any]) -> ModelConfig:
    """Builds a ModelConfig from a config in Hugging Face's form, of transformers 4 or 5.

    Raises:
      UnsupportedModelError: The architecture, or a variant that the config asks for, isn't supported.
      ModelLoadError: A number is missing, not a number, or out of range.
    """
    architecture = _architecture(config)
    _refuse_variants(config)
    hidden_size = _integer(config, "hidden_size")
    num_heads = _integer(config, "num_attention_heads")
    rope_theta, rope_scaling = _rope(config)
    try:
        return ModelConfig(
            architecture=architecture,
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(config, "intermediate_size"),
            num_hidden_layers=_integer(config, "num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=_integer(config, "num_key_value_heads", num_heads),
            head_dim=_integer(config, "head_dim", hidden_size // num_heads),
            max_position_embeddings=_integer(config, "max_position_embeddings"),
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=_boolean(config, "tie_word_embeddings"),
            attention_bias=_boolean(config, "attention_bias"),
            mlp_bias=_boolean(config, "mlp_bias"),
            bos_token_id=_token_id(config, "bos_token_id"),
            eos_token_ids=token_ids(config, "eos_token_id"),
        )
    except ConfigError as error:
        raise ModelLoadError(f"the model's config is damaged: {error}") from error


def token_ids(config: dict[str, Any], name: str) -> tuple[int, ...]:
    """Returns a config's token id, list of them, or null as a tuple.

    Raises:
      ModelLoadError: It is neither.
    """
    value = config.get(name)
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    return tuple(_check_integer(name, item, 0) for item in values)


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


def _refuse_variants(config: dict[str, Any]) -> None:
    if config.get("quantization_config") is not None:
        raise UnsupportedModelError(
            "Hugging Face checkpoints with a quantization_config are not supported; "
            "give the unquantised model or a .gguf file"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act must be 'silu', got {activation!r:.80}")


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Returns (theta, scaling): from rope_parameters (transformers 5), or rope_theta and rope_scaling."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ModelLoadError(f"the model's rope parameters must be an object, got {parameters!r:.80}")
    scaling = dict(parameters)
    theta = _number({"rope_theta": scaling.pop("rope_theta", config.get("rope_theta"))}, "rope_theta", 10000.0)
    rotated = scaling.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor must be 1, got {rotated!r:.40}")
    rope_type = scaling.pop("type", _DEFAULT_ROPE_TYPE)
    rope_type = scaling.pop("rope_type", rope_type)
    if not isinstance(rope_type, str):
        raise ModelLoadError(f"the model's rope_type must be a string, got {rope_type!r:.80}")
    if rope_type == _DEFAULT_ROPE_TYPE:
        return theta, None
    for name, value in scaling.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, (int, float)):
                _number({name: item}, name, low=-math.inf)
    return theta, {"rope_type": rope_type, **scaling}


def _integer(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    return _check_integer(name, value, 1)


def _check_integer(name: str, value: Any, low: int) -> int:
    if type(value) is not int or not low <= value <= _INT_MAX:
        raise ModelLoadError(f"the model's {name} must be an integer in [{low}, {_INT_MAX}], got {value!r:.80}")
    return value


def _number(config: dict[str, Any], name: str, default: float = 0.0, low: float = 0.0) -> float:
    """Returns a number above `low` that float32 can hold."""
    value = config.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not low < value <= _FLOAT_MAX:
        raise ModelLoadError(f"the model's {name} must be a finite number above {low}, got {value!r:.80}")
    return float(value)


def _boolean(config: dict[str, Any], name: str) -> bool:
    value = config.get(name)
    if not isinstance(value, (bool, type(None))):
        raise ModelLoadError(f"the model's {name} must be true or false, got {value!r:.80}")
    return bool(value)


def _token_id(config: dict[str, Any], name: str) -> int | None:
    ids = token_ids(config, name)
    return ids[0] if ids else None
