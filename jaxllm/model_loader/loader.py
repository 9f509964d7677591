"""Brings a checkpoint's tensors into sharded device arrays, one parameter at a time."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.config import KV_CACHE_DTYPES, EngineConfig, ModelConfig
from jaxllm.exceptions import ModelLoadError
from jaxllm.layers.quantization import declare_cache_scales, declare_quantized
from jaxllm.layers.rope import for_context
from jaxllm.model_loader.checkpoint import Checkpoint, open_checkpoint
from jaxllm.models.causal_lm import CausalLM, Family, ModelPart, model_parts
from jaxllm.models.registry import FAMILIES
from jaxllm.models.weight_map import Weight
from jaxllm.progress import progress_bar
from jaxllm.quantization import SCALE_SUFFIX, SCHEMES, quantize
from sharding.partition import abstract_weight, put_weight

_CACHE_SCALES = ".cache_scales"


def load_model(
    config: EngineConfig, mesh: Mesh, dtype: jnp.dtype, hidden_dtype: jnp.dtype, part: ModelPart | None = None
) -> CausalLM:
    """Builds the model and fills it with the checkpoint's weights.

    Never holds the model twice: each tensor is read, arranged, put on its devices and let go.

    Args:
      config: Names the checkpoint and the architecture.
      mesh: Where the weights go; each one's logical axes say how.
      dtype: Of the weights in device memory, and of the products with them. Norms have their own.
      hidden_dtype: Of what flows from layer to layer.
      part: What to load: its layers alone, and its share of the frame, whose other weights stay declarations. None is
        the whole model.

    Raises:
      ModelLoadError: A tensor is missing, left over, or of another shape than the config says.
    """
    model = _settled(config)
    family: Family = importlib.import_module(FAMILIES[model.architecture]).FAMILY
    checkpoint = open_checkpoint(str(config.model_path))
    weights = weight_map(model, family)
    stored_names = _stored_names(checkpoint, weights, model, family)
    part = part or model_parts(model.num_hidden_layers, 1)[0]
    declared = _declare(config, model, family, dtype, hidden_dtype, part)
    scales: dict[str, np.ndarray] = {}  # of numbers whose scales come next
    with progress_bar(_num_bytes(declared, part), "loading weights", "B") as bar:

        def load(name: str, parameter: nnx.Param[jax.Array]) -> jax.Array:
            want = parameter.get_value()
            if name in scales:
                value = scales.pop(name)
            elif name.endswith(_CACHE_SCALES):  # no checkpoint has them: worker/kv_calibration.py measures them
                value = np.ones(want.shape, np.float32)
            else:
                value = arrange(checkpoint, weights[name], stored_names, want.shape)
                scheme = parameter.get_metadata("scheme", None)
                if scheme is not None:
                    value, scales[name + SCALE_SUFFIX] = quantize(value, scheme)
            array = put_weight(value.astype(want.dtype, copy=False), mesh, parameter.get_metadata("logical_axes"))
            bar.update(value.size * want.dtype.itemsize)
            return array

        return _filled(declared, part, load)


def abstract_model(
    config: EngineConfig, mesh: Mesh, dtype: jnp.dtype, hidden_dtype: jnp.dtype, part: ModelPart | None = None
) -> CausalLM:
    """Declares what load_model would load: each weight it holds is a jax.ShapeDtypeStruct with its sharding.

    No checkpoint is read, and the mesh's devices need not exist here.
    """
    model = _settled(config)
    family: Family = importlib.import_module(FAMILIES[model.architecture]).FAMILY
    part = part or model_parts(model.num_hidden_layers, 1)[0]

    def describe(_: str, parameter: nnx.Param[jax.Array]) -> jax.ShapeDtypeStruct:
        want = parameter.get_value()
        return abstract_weight(want.shape, want.dtype, mesh, parameter.get_metadata("logical_axes"))

    return _filled(_declare(config, model, family, dtype, hidden_dtype, part), part, describe)


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
    except ValueError as error:
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


def _settled(config: EngineConfig) -> ModelConfig:
    """Returns the model's config with what depends on the context that is served decided."""
    model = config.model
    scaling = for_context(model.rope_scaling, model.max_position_embeddings, config.scheduler.max_model_len)
    return replace(model, rope_scaling=scaling)


def _declare(
    config: EngineConfig,
    model_config: ModelConfig,
    family: Family,
    dtype: jnp.dtype,
    hidden_dtype: jnp.dtype,
    part: ModelPart,
) -> CausalLM:
    """Declares the part's layers and the whole frame, without taking memory."""
    scheme = SCHEMES.get(config.quantization or "")

    def build() -> CausalLM:
        layers = [family.build_layer(model_config, index, dtype) for index in part.layers]
        declared = CausalLM(family.build_frame(model_config, dtype, hidden_dtype), layers)
        declare_quantized(declared, lambda _: scheme)
        if KV_CACHE_DTYPES[config.cache.cache_dtype] == "int8":
            declare_cache_scales(declared)
        return declared

    model: CausalLM = nnx.eval_shape(build)
    return model


def _filled(model: CausalLM, part: ModelPart, make: Callable[[str, Any], Any]) -> CausalLM:
    """Replaces the declarations that the part holds by make(name in the whole model, declaration).

    In the order of the names: numbers come before their scales.
    """
    graph_def, state = nnx.split(model)
    parameters = dict(nnx.to_flat_state(state))
    for path, name in _held(model, part, parameters):
        parameters[path] = parameters[path].replace(make(name, parameters[path]))
    return nnx.merge(graph_def, nnx.from_flat_state(parameters))


def _num_bytes(model: CausalLM, part: ModelPart) -> int:
    parameters = dict(nnx.to_flat_state(nnx.split(model)[1]))
    held = [parameters[path].get_value() for path, _ in _held(model, part, parameters)]
    return sum(value.size * value.dtype.itemsize for value in held)


def _held(model: CausalLM, part: ModelPart, paths: Iterable[tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yields those paths of a declared part that it holds, each with its name in the whole model."""
    for path in paths:
        kind, place, *rest = path
        if kind == "layers":
            yield path, ".".join(map(str, (kind, part.layers[place], *rest)))
        elif part.holds(model.frame, place):
            yield path, ".".join(map(str, path))


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
    missing, left_over = sorted(set(needed) - stored.keys()), sorted(stored.keys() - set(needed))
    if missing or left_over:
        what = f"lacks {missing[0]}" if missing else f"has {left_over[0]}, which {config.architecture} doesn't use"
        raise ModelLoadError(
            f"{checkpoint.path}: {what} ({len(missing)} missing and {len(left_over)} left-over tensors); "
            "the file is incomplete or its config belongs to another model"
        )
    return stored
