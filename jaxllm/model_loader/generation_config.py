"""generation_config.json: which of them holds, and whether its sampling defaults are numbers. Imports no jax."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.exceptions import ConfigError, ModelLoadError
from jaxllm.model_loader.model_files import read_json
from jaxllm.model_loader.model_folder import GENERATION_CONFIG_NAME

# The fields that vLLM takes as defaults of requests, those that we have.
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
# Words for "none": vLLM's, and our own.
NO_CONFIG = ("vllm", "jaxllm")


def choose_generation_config(setting: str, of_model: Mapping[str, Any], model_path: Path) -> dict[str, Any]:
    """Returns the generation config whose sampling defaults hold.

    Args:
      setting: "auto": the model's own; "vllm" or "jaxllm": none; else a folder that holds one.
      of_model: The model's own; empty where it has none.
      model_path: The model, for error messages.

    Raises:
      ConfigError: The folder has none.
      ModelLoadError: A sampling default is no number.
    """
    if setting in NO_CONFIG:
        return {}
    if setting == "auto":
        found, where = dict(of_model), model_path / GENERATION_CONFIG_NAME
    else:
        where = Path(setting).expanduser() / GENERATION_CONFIG_NAME
        if not where.is_file():
            raise ConfigError(
                f"generation_config must be auto, {', '.join(NO_CONFIG)} or a folder with a {GENERATION_CONFIG_NAME}, "
                f"got {setting!r:.200}; set --generation-config"
            )
        found = read_json(where)
    for name in SAMPLING_FIELDS:
        value = found.get(name)
        if value is not None and not (type(value) in (int, float) and math.isfinite(value)):
            raise ModelLoadError(f"{where}: {name} must be a number, got {value!r:.80}; set --generation-config vllm")
    return found


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sampling parameters that a generation config sets for requests that leave them out, by our names."""
    found = {name: generation_config[name] for name in SAMPLING_FIELDS if generation_config.get(name) is not None}
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    return found
