"""Brings a checkpoint's tensors into sharded device arrays, one parameter at a time."""

import importlib
from collections.abc import Mapping
from dataclasses import replace

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
from jaxllm.models.causal_lm import CausalLM, Family
from jaxllm.models.registry import FAMILIES
from jaxllm.models.weight_map import Weight
from jaxllm.progress import progress_bar
from jaxllm.quantization import SCALE_SUFFIX, SCHEMES, quantize
from sharding.rules import sharding_for

_CACHE_SCALES = ".cache_scales"


def load_model(config: EngineConfig, mesh: Mesh, dtype: jnp.dtype, hidden_dtype: jnp.dtype) -> CausalLM:
    """Builds the model and fills it with the checkpoint's weights.

    Never holds the model twice: each tensor is read, arranged, put on its devices and let go.

    Args:
      config: Names the checkpoint and the architecture.
      mesh: Where the weights go; each one's logical axes say how.
      dtype: Of the weights in device memory, and of the products with them. Norms have their own.
      hidden_dtype: Of what flows from layer to layer.

    Raises:
      ModelLoadError: A tensor is missing, left over, or of another shape than the config says.
    """
    model = _settled(config)
    family: Family = importlib.import_module(FAMILIES[model.architecture]).FAMILY
    checkpoint = open_checkpoint(str(config.model_path))
    weights = weight_map(model, family)
    stored_names = _stored_names(checkpoint, weights, model, family)
    scheme = SCHEMES.get(config.quantization or "")

    def declare() -> CausalLM:
        declared = _declare(model, family, dtype, hidden_dtype)
        declare_quantized(declared, lambda _: scheme)
        if KV_CACHE_DTYPES[config.cache.cache_dtype] == "int8":
            declare_cache_scales(declared)
        return declared

    graph_def, state = nnx.split(nnx.eval_shape(declare))
    parameters = {".".join(map(str, path)): (path, parameter) for path, parameter in nnx.to_flat_state(state)}
    total_bytes = sum(value.size * value.dtype.itemsize for value in jax.tree.leaves(state))
    loaded = []
    with progress_bar(total_bytes, "loading weights", "B") as bar:
        for name, (_, parameter) in parameters.items():
            if name.removesuffix(SCALE_SUFFIX) != name:  # comes with its numbers
                continue
            if name.endswith(_CACHE_SCALES):  # no checkpoint has them: worker/kv_calibration.py measures them
                parts = {"": np.ones(parameter.get_value().shape, np.float32)}
            else:
                parts = _parts(checkpoint, weights[name], stored_names, parameter)
            for suffix, value in parts.items():
                path, part = parameters[name + suffix]
                array = jax.device_put(value, sharding_for(mesh, part.get_metadata("logical_axes")))
                loaded.append((path, part.replace(array)))
                bar.update(array.nbytes)
    return nnx.merge(graph_def, nnx.from_flat_state(loaded))


def weight_map(config: ModelConfig, family: Family) -> dict[str, Weight]:
    """Returns every parameter's weights, by its path in CausalLM."""
    weights = family.frame_weights(config)
    for index in range(config.num_hidden_layers):
        for name, weight in family.layer_weights(config, index).items():
            weights[f"layers.{index}.{name}"] = weight
    return weights


def _parts(
    checkpoint: Checkpoint, weight: Weight, stored_names: Mapping[str, str], parameter: nnx.Param[jax.Array]
) -> dict[str, np.ndarray]:
    """Returns what is held for one declared weight, by what its path has appended: itself, and its scales if any."""
    want = parameter.get_value()
    value = arrange(checkpoint, weight, stored_names, want.shape)
    scheme = parameter.get_metadata("scheme", None)
    if scheme is None:
        return {"": value.astype(want.dtype)}
    values, scales = quantize(value, scheme)
    return {"": values.astype(want.dtype, copy=False), SCALE_SUFFIX: scales}


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
