"""What a config.json says of weights that are stored as numbers: its quantization_config, checked. Imports no jax.

Read are AWQ, GPTQ, compressed-tensors (int8, fp8, packed int4 and int8), fp8 of blocks and MXFP4. How their tensors
look is for packed_numbers.py to know.

Of activations it is read whether they are quantized, and no more: ours always get a scale a token, measured when they
are there, which is at least as exact as the scales that some checkpoints bring for them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxllm.exceptions import ModelLoadError, UnsupportedModelError
from jaxllm.model_loader.config_fields import boolean, check_integer, integer
from jaxllm.quantization import Scheme

FP8 = "float8_e4m3fn"
MXFP4_GROUP_SIZE = 32
_NAMES = ("quantization_config", "compression_config")  # the second is what compressed-tensors wrote until 2024
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
_WAY_OUT = "give the unquantised model or a .gguf file"

Config = dict[str, Any]


@dataclass(frozen=True)
class StoredFormat:
    """How a checkpoint holds its quantized weights.

    Attributes:
      layout: A name in packed_numbers.LAYOUTS.
      scheme: How they can be multiplied with as they are; None where they are de-quantised.
      num_bits: Of a number.
      group_size: Inputs that share a scale; None: all.
      zero_offset: What is added to stored zero points.
      num_rows: Outputs that share a scale, where those are of blocks.
    """

    layout: str
    scheme: Scheme | None
    num_bits: int = 8
    group_size: int | None = None
    zero_offset: int = 0
    num_rows: int = 1


def without_quantization(config: Config) -> Config:
    """Returns a config.json for the same model with weights that are stored otherwise."""
    return {name: value for name, value in config.items() if name not in _NAMES}


def stored_format(config: Config) -> StoredFormat | None:
    """Returns the format of a model's quantized weights; None where it has none.

    Args:
      config: config.json.

    Raises:
      UnsupportedModelError: It is one that isn't read.
      ModelLoadError: It is damaged.
    """
    stored = _stored(config)
    if stored is None:
        return None
    method = stored_method(config)
    if method not in _METHODS:
        raise UnsupportedModelError(f"quantization {method!r:.80} is not read; {', '.join(_METHODS)} are; {_WAY_OUT}")
    if config.get("architectures") == ["GPT2LMHeadModel"]:
        raise UnsupportedModelError(f"GPT2LMHeadModel is not read from quantized weights; {_WAY_OUT}")
    return _METHODS[method](stored)


def stored_method(config: Config) -> str | None:
    """Returns the name of the method by which a model's weights are quantized; None where they aren't.

    Raises:
      ModelLoadError: It is damaged.
    """
    stored = _stored(config)
    if stored is None:
        return None
    method = stored.get("quant_method")
    if not isinstance(method, str):
        raise ModelLoadError(f"the model's quant_method must be a name, got {method!r:.80}")
    return method


def _stored(config: Config) -> Config | None:
    stored = next((config[name] for name in _NAMES if config.get(name) is not None), None)
    if stored is not None and not isinstance(stored, dict):
        raise ModelLoadError(f"the model's quantization_config must be an object, got {stored!r:.80}")
    return stored


def _awq(stored: Config) -> StoredFormat:
    _only(stored, "awq", "bits", 4, 4)
    _only(stored, "awq", "version", "gemm", "gemm", "GEMM")
    size = _group_size(stored)
    # Less their zero points, numbers are from -15 to 15.
    return StoredFormat("awq", Scheme("awq", "int8", size, False), num_bits=4, group_size=size)


def _gptq(stored: Config) -> StoredFormat:
    bits = _only(stored, "gptq", "bits", None, 4, 8)
    kind = _only(stored, "gptq", "checkpoint_format", "gptq", "gptq", "gptq_v2")
    is_symmetric, size = boolean(stored, "sym", True), _group_size(stored)
    scheme = Scheme("gptq", "int4" if is_symmetric and bits == 4 else "int8", size, False)
    fits = is_symmetric or bits == 4  # eight bits less a zero point need nine
    return StoredFormat("gptq", scheme if fits else None, bits, size, zero_offset=1 if kind == "gptq" else 0)


def _fp8(stored: Config) -> StoredFormat:
    _only(stored, "fp8", "fmt", "e4m3", "e4m3")
    block = stored.get("weight_block_size")
    if block is None:
        return StoredFormat("plain", Scheme("fp8", FP8, None, True))
    num_rows, size = _block("weight_block_size", block)
    return StoredFormat("blocks", Scheme("fp8", FP8, size, False), group_size=size, num_rows=num_rows)


def _mxfp4(stored: Config) -> StoredFormat:
    # Twice the numbers that four bits of floating point hold are integers up to 12.
    scheme = Scheme("mxfp4", "int8", MXFP4_GROUP_SIZE, False)
    return StoredFormat("mxfp4", scheme, num_bits=4, group_size=MXFP4_GROUP_SIZE)


def _compressed_tensors(stored: Config) -> StoredFormat:
    method, (weights, has_activations) = "compressed-tensors", _one_group(stored)
    for name in ("sparsity_config", "transform_config"):
        extra = stored.get(name) or {}
        if not isinstance(extra, dict) or extra.get("format", "dense") != "dense" or extra.get("config_groups"):
            raise UnsupportedModelError(f"{method} with {name} {extra!r:.80} is not read; {_WAY_OUT}")
    kind = _only(stored, method, "format", None, *_FORMATS)
    is_packed = kind == "pack-quantized"
    number_type = _only(weights, method, "type", "int", *(("int",) if is_packed else ("int", "float")))
    bits = _only(weights, method, "num_bits", None, *((4, 8) if is_packed else (8,)))
    strategy = _only(weights, method, "strategy", None, "tensor", "channel", "group", "block")
    num_rows, group_size = 1, None
    if strategy == "block":
        num_rows, group_size = _block("block_structure", weights["block_structure"])
    elif strategy == "group":
        group_size = _group_size(weights)
    is_symmetric = boolean(weights, "symmetric", True)
    dtype_name = FP8 if number_type == "float" else "int4" if bits == 4 and is_symmetric else "int8"
    scheme = Scheme(method, dtype_name, group_size, has_activations and bits == 8 and group_size is None)
    fits = is_symmetric or bits == 4  # eight bits less a zero point need nine
    layout = "packed" if is_packed else "plain"
    return StoredFormat(layout, scheme if fits else None, bits, group_size, num_rows=num_rows)


def _one_group(stored: Config) -> tuple[Config, bool]:
    """Returns what is said of weights, and whether activations are quantized. Groups must agree in both."""
    groups = stored.get("config_groups")
    values = list(groups.values()) if isinstance(groups, dict) else []
    if not values or not all(isinstance(group, dict) and isinstance(group.get("weights"), dict) for group in values):
        raise ModelLoadError(f"the model's config_groups must be objects with weights, got {groups!r:.80}")
    said = [(_of_weights(group["weights"]), bool(group.get("input_activations"))) for group in values]
    if any(other != said[0] for other in said):
        raise UnsupportedModelError(
            f"compressed-tensors with config_groups that store weights in different ways is not read; {_WAY_OUT}"
        )
    return said[0]


def _of_weights(weights: Config) -> Config:
    names = ("type", "num_bits", "strategy", "symmetric", "group_size", "block_structure")
    return {name: weights.get(name) for name in names}


def _group_size(stored: Config) -> int | None:
    """Returns inputs that share a scale; None for -1, which means all."""
    return None if stored.get("group_size") == -1 else integer(stored, "group_size", 128)


def _block(name: str, sizes: Any) -> tuple[int, int]:
    """Returns outputs and inputs that share a scale."""
    if isinstance(sizes, str):
        sizes = [int(size) if size.isdecimal() else size for size in sizes.split("x")]
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise ModelLoadError(f"the model's {name} must be two sizes, got {sizes!r:.80}")
    return check_integer(name, sizes[0], 1), check_integer(name, sizes[1], 1)


def _only(stored: Config, method: str, name: str, default: Any, *allowed: Any) -> Any:
    """Returns a field, which must be one of the few values that are read."""
    value = stored.get(name)
    value = default if value is None else value
    if value not in allowed or isinstance(value, bool):
        raise UnsupportedModelError(
            f"{method} with {name} {value!r:.80} is not read; {' and '.join(map(str, allowed))} are; {_WAY_OUT}"
        )
    return value


_METHODS: dict[str, Callable[[Config], StoredFormat]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
METHODS = tuple(_METHODS)
