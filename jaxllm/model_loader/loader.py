"""Brings a checkpoint's tensors into sharded device arrays, one parameter at a time."""

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.config import EngineConfig, ModelConfig
from jaxllm.exceptions import ModelLoadError
from jaxllm.layers.rope import for_context
from jaxllm.logger import get_logger
from jaxllm.model_loader.checkpoint import Checkpoint, open_checkpoint
from jaxllm.model_loader.dummy_weights import dummy_weight
from jaxllm.model_loader.orbax_checkpoint import OrbaxCheckpoint
from jaxllm.model_loader.orbax_manifest import check_matches
from jaxllm.models.causal_lm import CausalLM, Family
from jaxllm.models.registry import FAMILIES
from jaxllm.models.weight_map import Weight
from jaxllm.progress import Progress, progress_bar
from sharding.rules import sharding_for

_logger = get_logger(__name__)


def load_model(config: EngineConfig, mesh: Mesh, dtype: jnp.dtype, hidden_dtype: jnp.dtype) -> CausalLM:
    """Builds the model and fills it with the checkpoint's weights.

    Never holds the model twice: each tensor is read, arranged, put on its devices and let go.

    Args:
      config: Names the checkpoint and the architecture.
      mesh: Where the weights go; each one's logical axes say how.
      dtype: Of the weights in device memory, and of the products with them. Norms have their own.
      hidden_dtype: Of what flows from layer to layer.

    Raises:
      ModelLoadError: A tensor is missing, left over, or of another shape than the config says, or a file is damaged.
    """
    model = _settled(config)
    family: Family = importlib.import_module(FAMILIES[model.architecture]).FAMILY
    graph_def, state = nnx.split(nnx.eval_shape(lambda: _declare(model, family, dtype, hidden_dtype)))
    parameters = nnx.to_flat_state(state)
    wanted = {_name(path): _wanted(parameter, mesh) for path, parameter in parameters}
    num_bytes = sum(weight.size * weight.dtype.itemsize for weight in wanted.values())
    start_s = time.monotonic()
    with progress_bar(num_bytes, "loading weights", "B") as bar:
        arrays = _load_weights(config, model, family, wanted, bar)
    elapsed_s = time.monotonic() - start_s
    num_gb = num_bytes / 1e9
    _logger.info("loaded %.2f GB of weights in %.2f s, %.2f GB/s", num_gb, elapsed_s, num_gb / max(elapsed_s, 1e-9))
    loaded = [(path, parameter.replace(arrays[_name(path)])) for path, parameter in parameters]
    return nnx.merge(graph_def, nnx.from_flat_state(loaded))


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _wanted(parameter: nnx.Variable[Any], mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and sharding of a declared parameter."""
    value = parameter.get_value()
    sharding = sharding_for(mesh, parameter.get_metadata("logical_axes"))
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)


def _load_weights(
    config: EngineConfig, model: ModelConfig, family: Family, wanted: Mapping[str, jax.ShapeDtypeStruct], bar: Progress
) -> dict[str, jax.Array]:
    if config.load_format == "dummy":
        return _put_all(wanted, lambda name: dummy_weight(wanted[name].shape), bar)
    checkpoint = open_checkpoint(str(config.model_path), config.load_format)
    if isinstance(checkpoint, OrbaxCheckpoint):
        return _restore(checkpoint, wanted, bar)
    weights = weight_map(model, family)
    stored_names = _stored_names(checkpoint, weights, model, family)
    return _put_all(wanted, lambda name: arrange(checkpoint, weights[name], stored_names, wanted[name].shape), bar)


def _restore(
    checkpoint: OrbaxCheckpoint, wanted: Mapping[str, jax.ShapeDtypeStruct], bar: Progress
) -> dict[str, jax.Array]:
    """Reads a converted model's weights, each device's part straight to it."""
    check_matches(checkpoint.manifest, wanted, checkpoint.path)
    arrays: dict[str, jax.Array] = {}
    for name, weight in wanted.items():
        read = partial(_read_part, checkpoint, name, weight.dtype)
        arrays[name] = jax.make_array_from_callback(weight.shape, weight.sharding, read)
        bar.update(arrays[name].nbytes)
    return arrays


def _read_part(checkpoint: OrbaxCheckpoint, name: str, dtype: np.dtype, index: tuple[slice, ...] | None) -> np.ndarray:
    return checkpoint.read(name, index or ()).astype(dtype, copy=False)


def _put_all(
    wanted: Mapping[str, jax.ShapeDtypeStruct], read: Callable[[str], np.ndarray], bar: Progress
) -> dict[str, jax.Array]:
    """Reads the weights one by one and puts each on its devices."""
    arrays = {}
    for name, weight in wanted.items():
        arrays[name] = jax.device_put(read(name).astype(weight.dtype, copy=False), weight.sharding)
        bar.update(arrays[name].nbytes)
    return arrays


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


def _declare(config: ModelConfig, family: Family, dtype: jnp.dtype, hidden_dtype: jnp.dtype) -> CausalLM:
    layers = [family.build_layer(config, index, dtype) for index in range(config.num_hidden_layers)]
    return CausalLM(family.build_frame(config, dtype, hidden_dtype), layers)


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
