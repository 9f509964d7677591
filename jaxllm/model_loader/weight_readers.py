"""Where a model's weights come from: tensors that are arranged and quantized, a converted model, or nowhere."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.config import EngineConfig, ModelConfig
from jaxllm.exceptions import ModelLoadError
from jaxllm.model_loader.checkpoint import Checkpoint, open_checkpoint
from jaxllm.model_loader.dummy_weights import dummy_weight
from jaxllm.model_loader.gguf_checkpoint import GGUFCheckpoint
from jaxllm.model_loader.orbax_checkpoint import OrbaxCheckpoint
from jaxllm.model_loader.quantized_checkpoint import QuantizedCheckpoint
from jaxllm.model_loader.stored_numbers import StoredNumbers
from jaxllm.models.causal_lm import Family
from jaxllm.models.weight_map import Weight, joined
from jaxllm.quantization import SCALE_SUFFIX, SCHEMES, QuantizedWeight, Scheme, quantize, quantize_joined
from sharding.partition import abstract_weight, dealt_shape, pieces_of, put, put_weight, whole_again

_CACHE_SCALES = ".cache_scales"
_FLOATS = ("float32", "float16", "bfloat16")
SchemeOf = Callable[[str, int], Scheme | None]  # (path of a parameter in CausalLM, its inputs) -> how it is held


class WeightReader(Protocol):
    """Brings weights to their devices, in the order in which the model declares them."""

    def scheme_of(self, name: str, num_inputs: int) -> Scheme | None:
        """Returns how the parameter of that name in CausalLM is held, if it can be quantized; None: as floats."""
        ...

    def load(self, name: str, parameter: "nnx.Param[jax.Array]", mesh: Mesh) -> jax.Array:
        """Returns the parameter of that name in CausalLM.

        Raises:
          ModelLoadError: There is none, or none of the declared shape.
        """
        ...


def open_reader(config: EngineConfig, model: ModelConfig, family: Family) -> WeightReader:
    """Opens the checkpoint, if there is one.

    Raises:
      ModelLoadError: A tensor is missing or left over, or a file is damaged.
    """
    scheme_of = stated_schemes(config)
    if config.load_format == "dummy":
        return TensorReader(
            lambda _, shape: dummy_weight(shape),
            lambda _, shape, scheme: quantize(dummy_weight(shape), scheme),
            scheme_of,
        )
    checkpoint = open_checkpoint(str(config.model_path), config.load_format)
    weights = weight_map(model, family)
    if isinstance(checkpoint, OrbaxCheckpoint):
        return OrbaxReader(checkpoint, weights, scheme_of)
    stored_names = _stored_names(checkpoint, weights, model, family)

    def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return arrange(checkpoint, weights[name], stored_names, shape)

    def read_numbers(name: str, shape: tuple[int, ...], scheme: Scheme) -> QuantizedWeight:
        return arrange_numbers(checkpoint, weights[name], stored_names, shape, scheme)

    if not isinstance(checkpoint, QuantizedCheckpoint) or config.quantization is not None:
        return TensorReader(read, read_numbers, scheme_of)
    stored = StoredNumbers(checkpoint, weights, stored_names)

    def read_dequantized(name: str, shape: tuple[int, ...]) -> np.ndarray:
        stored.tell_dequantized(name)
        return read(name, shape)

    return TensorReader(read_dequantized, stored.read, stored.scheme_of)


def stated_schemes(config: EngineConfig) -> SchemeOf:
    """Returns how weights are held by the configuration alone: as asked for, or what is stored of layers as stored."""
    scheme = SCHEMES.get(config.quantization or "")
    if scheme is not None or config.model.stored_scheme is None:
        return lambda *_: scheme
    return lambda name, _: config.model.stored_scheme if name.startswith("layers.") else None


class TensorReader:
    """Makes parameters of whole arrays, quantized where they are declared so.

    Args:
      read: (name of the parameter, its shape) -> its value as floats.
      read_numbers: (name, shape, scheme) -> its numbers.
      scheme_of: As WeightReader's.
    """

    def __init__(
        self,
        read: Callable[[str, tuple[int, ...]], np.ndarray],
        read_numbers: Callable[[str, tuple[int, ...], Scheme], QuantizedWeight],
        scheme_of: SchemeOf,
    ) -> None:
        self._read, self._read_numbers, self._scheme_of = read, read_numbers, scheme_of
        self._scales: dict[str, np.ndarray] = {}  # they come with their numbers, and wait for their turn

    def scheme_of(self, name: str, num_inputs: int) -> Scheme | None:
        """Implements WeightReader."""
        return self._scheme_of(name, num_inputs)

    def load(self, name: str, parameter: "nnx.Param[jax.Array]", mesh: Mesh) -> jax.Array:
        """Implements WeightReader."""
        if name.endswith(_CACHE_SCALES):
            return _unmeasured_scales(parameter, mesh)
        return put_weight(self._value(name, parameter), mesh, parameter.get_metadata("logical_axes"))

    def _value(self, name: str, parameter: "nnx.Param[jax.Array]") -> np.ndarray:
        want, scheme = parameter.get_value(), parameter.get_metadata("scheme", None)
        if name in self._scales:
            return self._scales.pop(name)
        if scheme is None:
            return self._read(name, want.shape).astype(want.dtype, copy=False)
        value, self._scales[name + SCALE_SUFFIX] = self._read_numbers(name, want.shape, scheme)
        return value.astype(want.dtype, copy=False)


class OrbaxReader:
    """Reads a converted model's weights, each device's part straight to it where they are laid out for the mesh."""

    def __init__(self, checkpoint: OrbaxCheckpoint, weights: Mapping[str, Weight], scheme_of: SchemeOf) -> None:
        self._checkpoint, self._scheme_of = checkpoint, scheme_of
        stored = checkpoint.manifest.weights
        if left_over := sorted(name for name in stored if name.removesuffix(SCALE_SUFFIX) not in weights):
            raise ModelLoadError(
                f"{checkpoint.path}: has a weight {left_over[0]!r:.200}, which its config doesn't ask for; "
                "the folder is damaged or the config belongs to another model"
            )

    def scheme_of(self, name: str, num_inputs: int) -> Scheme | None:
        """Implements WeightReader."""
        return self._scheme_of(name, num_inputs)

    def load(self, name: str, parameter: "nnx.Param[jax.Array]", mesh: Mesh) -> jax.Array:
        """Implements WeightReader."""
        if name.endswith(_CACHE_SCALES):
            return _unmeasured_scales(parameter, mesh)
        want, axes = parameter.get_value(), parameter.get_metadata("logical_axes")
        pieces = self._check(name, parameter)
        if pieces == pieces_of(mesh, axes):
            target = abstract_weight(want.shape, want.dtype, mesh, axes)
            return jax.make_array_from_callback(target.shape, target.sharding, partial(self._read, name, want.dtype))
        stored_shape = self._checkpoint.manifest.weights[name].shape
        stored = self._read(name, want.dtype, tuple(slice(0, size) for size in stored_shape))
        return put_weight(whole_again(stored, want.shape, pieces, axes), mesh, axes)

    def _check(self, name: str, parameter: "nnx.Param[jax.Array]") -> tuple[int, ...]:
        """Checks that the stored weight is what is declared. Returns what it is laid out for."""
        want, axes = parameter.get_value(), parameter.get_metadata("logical_axes")
        stored = self._checkpoint.manifest.weights.get(name)
        if stored is None:
            raise ModelLoadError(f"{self._checkpoint.path}: lacks the weight {name}; convert the model again")
        has_rank = len(stored.pieces) == want.ndim
        shape = dealt_shape(want.shape, stored.pieces, axes) if has_rank else want.shape
        if stored.shape != shape or not _can_become(stored.dtype, want.dtype.name):
            raise ModelLoadError(
                f"{self._checkpoint.path}: weight {name} must be {want.dtype}{list(shape)} by its config, got "
                f"{stored.dtype}{list(stored.shape)}; the folder is damaged or the config belongs to another model"
            )
        return stored.pieces

    def _read(self, name: str, dtype: np.dtype, region: tuple[slice, ...]) -> np.ndarray:
        return self._checkpoint.read(name, region).astype(dtype, copy=False)


def weight_map(config: ModelConfig, family: Family) -> dict[str, Weight]:
    """Returns every parameter's weights, by its path in CausalLM."""
    weights = family.frame_weights(config)
    for index in range(config.num_hidden_layers):
        for name, weight in family.layer_weights(config, index).items():
            weights[f"layers.{index}.{name}"] = weight
    return weights


def arrange(
    checkpoint: Checkpoint, weight: Weight, stored_names: Mapping[str, str], shape: tuple[int, ...]
) -> np.ndarray:
    """Reads the tensors of one parameter and makes it of them.

    Raises:
      ModelLoadError: The tensors don't fit together, or the result hasn't the parameter's shape.
    """
    parts = [checkpoint.read(stored_names[name]) for name in weight.names]
    try:
        value = weight.arrange(parts)
    except (IndexError, ValueError) as error:
        raise ModelLoadError(
            f"{checkpoint.path}: {' + '.join(weight.names[:4])} of shapes {[part.shape for part in parts[:4]]} don't "
            f"fit together: {error}"
        ) from error
    if value.shape != shape:
        raise ModelLoadError(
            f"{checkpoint.path}: {' + '.join(weight.names[:4])} must make an array of shape {shape} by the model's "
            f"config, got {value.shape}; the file is damaged or its config belongs to another model"
        )
    return value


def arrange_numbers(
    checkpoint: Checkpoint, weight: Weight, stored_names: Mapping[str, str], shape: tuple[int, ...], scheme: Scheme
) -> QuantizedWeight:
    """As `arrange`, quantized. A GGUF file's matrices are floats a few rows at a time, where rows stay as they are.

    Raises:
      ModelLoadError: As `arrange`.
    """
    if weight.arrange is joined and isinstance(checkpoint, GGUFCheckpoint):
        parts = [checkpoint.rows(stored_names[name]) for name in weight.names]
        num_rows = sum(part.shape[0] for part in parts)
        if all(part.shape == (part.shape[0], *shape[1:]) for part in parts) and num_rows == shape[0]:
            return quantize_joined(parts, scheme)
    return quantize(arrange(checkpoint, weight, stored_names, shape), scheme)


def _unmeasured_scales(parameter: "nnx.Param[jax.Array]", mesh: Mesh) -> jax.Array:
    """Returns scales of the KV cache, which no checkpoint has: worker/kv_calibration.py measures them.

    Ones also for the zero heads that fill up: rows are divided by them.
    """
    declared = parameter.get_value()
    target = abstract_weight(declared.shape, declared.dtype, mesh, parameter.get_metadata("logical_axes"))
    ones: jax.Array = put(np.ones(target.shape, target.dtype), target.sharding)
    return ones


def _can_become(stored: str, wanted: str) -> bool:
    """Whether numbers of one dtype may be loaded as another. The CPU holds int4 numbers, and stores them, as int8."""
    return stored == wanted or stored in _FLOATS and wanted in _FLOATS or (stored, wanted) == ("int8", "int4")


def _stored_names(
    checkpoint: Checkpoint, weights: Mapping[str, Weight], config: ModelConfig, family: Family
) -> dict[str, str]:
    """Returns the checkpoint's name of each tensor that the weights need.

    Checkpoints of a bare decoder leave out the prefix. Each of their tensors must be used once.

    Raises:
      ModelLoadError: A tensor is missing or left over.
    """
    needed = [name for weight in weights.values() for name in weight.names]
    assert len(needed) == len(set(needed)), "a family's weight map uses a tensor twice"
    stored = {name: name for name in checkpoint.tensor_names() if not family.is_ignored(config, name)}
    if not any(name.startswith(family.prefix) for name in stored):
        stored = {family.prefix + name: name for name in stored}
    if config.tie_word_embeddings:
        stored.pop("lm_head.weight", None)
    if isinstance(checkpoint, QuantizedCheckpoint):
        stored = {name: own for name, own in stored.items() if name in needed or not checkpoint.is_idle_bias(own)}
    missing, left_over = sorted(set(needed) - stored.keys()), sorted(stored.keys() - set(needed))
    if missing or left_over:
        has = "" if missing else f"has {left_over[0]!r:.200}, which {config.architecture} doesn't use"
        what = has or f"lacks {missing[0]!r:.200}"
        raise ModelLoadError(
            f"{checkpoint.path}: {what} ({len(missing)} missing and {len(left_over)} left-over tensors); "
            "the file is incomplete or its config belongs to another model"
        )
    return stored
