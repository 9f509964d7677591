"""Reading fields of a config.json: no value is believed before its kind and range are checked. Imports no jax."""

from typing import Any

from jaxllm.exceptions import ModelLoadError

INT_MAX = 2**31 - 1
FLOAT_MAX = 1e38  # float32 can hold it
# What is listed one by one, on the host; a damaged number would fill its memory.
_MAXIMA = {"num_hidden_layers": 10_000, "num_experts": 100_000, "head_dim": 1 << 16}


def integer(config: dict[str, Any], name: str, default: int | None = None, low: int = 1) -> int:
    """Returns an integer of at least `low`; `default` where the config has none or null.

    Raises:
      ModelLoadError: It is missing without a default, no integer, or out of range.
    """
    value = config.get(name)
    if value is None and default is not None:
        return default
    return check_integer(name, value, low)


def check_integer(name: str, value: Any, low: int) -> int:
    high = _MAXIMA.get(name, INT_MAX)
    if type(value) is not int or not low <= value <= high:
        raise ModelLoadError(f"the model's {name} must be an integer in [{low}, {high}], got {value!r:.80}")
    return value


def number(config: dict[str, Any], name: str, default: float = 0.0, low: float = 0.0) -> float:
    """Returns a number above `low`; `default` where the config has none or null.

    Raises:
      ModelLoadError: It is no number, or out of range.
    """
    value = config.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not low < value <= FLOAT_MAX:
        raise ModelLoadError(f"the model's {name} must be a finite number above {low}, got {value!r:.80}")
    return float(value)


def optional_number(config: dict[str, Any], name: str, default: float | None = None) -> float | None:
    """Returns a positive number, None for null, and `default` where the config hasn't the field."""
    if name not in config:
        return default
    return None if config[name] is None else number(config, name)


def boolean(config: dict[str, Any], name: str, default: bool = False) -> bool:
    """Returns a truth value; `default` where the config has none or null.

    Raises:
      ModelLoadError: It is neither true nor false.
    """
    value = config.get(name)
    if not isinstance(value, (bool, type(None))):
        raise ModelLoadError(f"the model's {name} must be true or false, got {value!r:.80}")
    return default if value is None else value


def integers(config: dict[str, Any], name: str, length: int | None = None, low: int = 0) -> tuple[int, ...]:
    """Returns a list of integers, empty where the config has none or null.

    Raises:
      ModelLoadError: It is no list of integers, or not of `length`.
    """
    values = config.get(name)
    if values is None:
        return ()
    if not isinstance(values, list) or (length is not None and len(values) != length):
        wanted = "a list" if length is None else f"a list of {length}"
        raise ModelLoadError(f"the model's {name} must be {wanted}, got {values!r:.80}")
    return tuple(check_integer(name, value, low) for value in values)


def token_ids(config: dict[str, Any], name: str) -> tuple[int, ...]:
    """Returns a config's token id, list of them, or null as a tuple.

    Raises:
      ModelLoadError: It is neither.
    """
    value = config.get(name)
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    return tuple(check_integer(name, item, 0) for item in values)
