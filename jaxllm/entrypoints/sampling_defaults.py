"""What a model's own generation_config sets for requests that leave it out. All servers share it."""

from collections.abc import Mapping
from typing import Any


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sampling parameters that a model's generation_config sets, under our names."""
    names = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")
    found = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    return found
