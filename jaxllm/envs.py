"""Environment variables, each parsed in one place. An unknown `JAXLLM_*` name or value is an error.

| name | meaning | default |
|---|---|---|
| JAXLLM_HOME | folder of fetched models and compiled programs | ~/.cache/jaxllm |
| JAXLLM_LOG_LEVEL | DEBUG, INFO, WARNING or ERROR | WARNING |
| JAXLLM_COMPILE_CACHE | 1: keep compiled programs on disk; 0: don't | 1 |
| JAXLLM_API_KEY | the key that a server's clients must bring, beside those of --api-key | none |
| JAXLLM_DEBUG | 1: check the engine's own books whenever it becomes idle; 0: don't | 0 |
| JAXLLM_ATTENTION | kernel backend: tpu, triton, xla or reference; read by pallas_kernels/backends.py | by platform |
"""

import os
from pathlib import Path

from jaxllm.exceptions import ConfigError

_CHOICES = {
    "JAXLLM_LOG_LEVEL": ("DEBUG", "INFO", "WARNING", "ERROR"),
    "JAXLLM_COMPILE_CACHE": ("1", "0"),
    "JAXLLM_DEBUG": ("1", "0"),
}
_KNOWN = ("JAXLLM_HOME", "JAXLLM_API_KEY", "JAXLLM_ATTENTION", *_CHOICES)


def home() -> Path:
    """Returns the folder that holds fetched models and compiled programs. It may not exist yet."""
    return Path(os.environ.get("JAXLLM_HOME") or Path.home() / ".cache" / "jaxllm").expanduser()


def log_level(default: str = "WARNING") -> str:
    return _choice("JAXLLM_LOG_LEVEL", default)


def api_key() -> str | None:
    """Returns the key that a server's clients must bring, or None."""
    return os.environ.get("JAXLLM_API_KEY") or None


def is_compile_cache_on() -> bool:
    return _choice("JAXLLM_COMPILE_CACHE", default="1") == "1"


def is_debug() -> bool:
    return _choice("JAXLLM_DEBUG", default="0") == "1"


def check_names() -> None:
    """Refuses `JAXLLM_*` variables that nobody reads.

    Raises:
      ConfigError: A variable has an unknown name.
    """
    unknown = sorted(name for name in os.environ if name.startswith("JAXLLM_") and name not in _KNOWN)
    if unknown:
        raise ConfigError(f"unknown environment variable {unknown[0]}; known: {', '.join(_KNOWN)}")


def _choice(name: str, default: str) -> str:
    value = os.environ.get(name) or default
    if value not in _CHOICES[name]:
        raise ConfigError(f"{name} must be one of {', '.join(_CHOICES[name])}, got {value!r}")
    return value
