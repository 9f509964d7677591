"""Brings a checkpoint's tensors into sharded device arrays, one parameter at a time."""

import importlib
from typing import Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.config import EngineConfig, ModelConfig
from jaxllm.exceptions import ModelLoadError
from jaxllm.model_loader.checkpoint import Checkpoint, open_checkpoint
from jaxllm.models.causal_lm import CausalLM
from jaxllm.models.registry import FAMILIES
from jaxllm.models.weight_map import Weight, frame_weights
from jaxllm.progress import progress_bar
from sharding.rules import sharding_for

# Tensors that some checkpoints carry although nothing needs them.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


class Family(Protocol):
    """What a family file offers."""

    def build_layer(self, config: ModelConfig, index: int, dtype: jnp.dtype) -> nnx.Module: ...

    def layer_weights(self, config: ModelConfig, index: int) -> dict[str, Weight]: ...


def load_model(config: EngineConfig, mesh: Mesh, dtype: jnp.dtype, hidden_dtype: jnp.dtype) -> CausalLM:
    """Builds the model and fills it with the checkpoint's weights.

    Never holds the model twice: each tensor is read, arranged, put on its devices and let go.

    Args:
      config: Names the checkpoint and the architecture.
      mesh: Where the weights go; each one's logical axes say how.
      dtype: Of the weights in device memory, and of the products with them.
      hidden_dtype: Of what flows from layer to layer.

    Raises:
      ModelLoadError: A tensor is missing, left over, or of another shape than the config says.
    """
    family = cast(Family, importlib.import_module(FAMILIES[config.model.architecture]))
    checkpoint = open_checkpoint(str(config.model_path))
    weights = weight_map(config.model, family)
    _check_names(checkpoint, weights, config.model)
    graph_def, state = nnx.split(nnx.eval_shape(lambda: _declare(config.model, family, dtype, hidden_dtype)))
    parameters = nnx.to_flat_state(state)
    total_bytes = sum(parameter.get_value().size * jnp.dtype(dtype).itemsize for _, parameter in parameters)
    loaded = []
    with progress_bar(total_bytes, "loading weights", "B") as bar:
        for path, parameter in parameters:
            name = ".".join(map(str, path))
            shape = parameter.get_value().shape
            value = arrange(checkpoint, weights[name], shape)
            sharding = sharding_for(mesh, parameter.get_metadata("logical_axes"))
            array = jax.device_put(value.astype(dtype), sharding)
            loaded.append((path, parameter.replace(array)))
            bar.update(array.nbytes)
    return nnx.merge(graph_def, nnx.from_flat_state(loaded))


def weight_map(config: ModelConfig, family: Family) -> dict[str, Weight]:
    """Returns every parameter's weights, by its path in CausalLM."""
    weights = frame_weights(config)
    for index in range(config.num_hidden_layers):
        for name, weight in family.layer_weights(config, index).items():
            weights[f"layers.{index}.{name}"] = weight
    return weights


def arrange(checkpoint: Checkpoint, weight: Weight, shape: tuple[int, ...]) -> np.ndarray:
    """Reads and joins the tensors of one parameter.

    Raises:
      ModelLoadError: The result doesn't have the parameter's shape.
    """
    parts = [checkpoint.read(name) for name in weight.names]
    value = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0)
    if value.shape != shape:
        raise ModelLoadError(
            f"{checkpoint.path}: {' + '.join(weight.names)} must make an array of shape {shape} by the model's "
            f"config, got {value.shape}; the file is damaged or its config belongs to another model"
        )
    return value


def _declare(config: ModelConfig, family: Family, dtype: jnp.dtype, hidden_dtype: jnp.dtype) -> CausalLM:
    layers = [family.build_layer(config, index, dtype) for index in range(config.num_hidden_layers)]
    return CausalLM(config, layers, dtype, hidden_dtype)


def _check_names(checkpoint: Checkpoint, weights: dict[str, Weight], config: ModelConfig) -> None:
    """Refuses a checkpoint whose tensors aren't each used once."""
    needed = [name for weight in weights.values() for name in weight.names]
    present = {name for name in checkpoint.tensor_names() if not name.endswith(_IGNORED_SUFFIXES)}
    if config.tie_word_embeddings:
        present.discard("lm_head.weight")
    missing, left_over = sorted(set(needed) - present), sorted(present - set(needed))
    if missing or left_over:
        what = f"lacks {missing[0]}" if missing else f"has {left_over[0]}, which {config.architecture} doesn't use"
        raise ModelLoadError(
            f"{checkpoint.path}: {what} ({len(missing)} missing and {len(left_over)} left-over tensors); "
            "the file is incomplete or its config belongs to another model"
        )
