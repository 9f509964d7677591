"""Declares a model and fills it with weights, one parameter at a time. Doesn't know where those come from."""

import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxllm.config import KV_CACHE_DTYPES, EngineConfig, ModelConfig
from jaxllm.exceptions import ConfigError
from jaxllm.layers.quantization import declare_cache_scales, declare_quantized
from jaxllm.layers.rope import for_context
from jaxllm.logger import get_logger
from jaxllm.model_loader.weight_readers import SchemeOf, open_reader, stated_schemes
from jaxllm.models.causal_lm import CausalLM, Family, ModelPart, model_parts
from jaxllm.models.registry import FAMILIES
from jaxllm.progress import progress_bar
from sharding.partition import abstract_weight
from sharding.split import UndividedError

_logger = get_logger(__name__)


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
      ConfigError: Inputs that share a scale would be on several devices.
    """
    model = _settled(config)
    family: Family = importlib.import_module(FAMILIES[model.architecture]).FAMILY
    part = part or model_parts(model.num_hidden_layers, 1)[0]
    start_s = time.monotonic()
    reader = open_reader(config, model, family)
    declared = _declare(config, model, family, dtype, hidden_dtype, part, reader.scheme_of)
    num_gb = _num_bytes(declared, part) / 1e9
    with progress_bar(num_gb * 1e9, "loading weights", "B") as bar:

        def load(name: str, parameter: nnx.Param[jax.Array]) -> jax.Array:
            array = reader.load(name, parameter, mesh)
            bar.update(array.nbytes)
            return array

        loaded = _filled(declared, part, load)
    elapsed_s = max(time.monotonic() - start_s, 1e-9)
    _logger.info("loaded %.2f GB of weights in %.2f s, %.2f GB/s", num_gb, elapsed_s, num_gb / elapsed_s)
    return loaded


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

    declared = _declare(config, model, family, dtype, hidden_dtype, part, stated_schemes(config))
    return _filled(declared, part, describe)


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
    scheme_of: SchemeOf,
) -> CausalLM:
    """Declares the part's layers and the whole frame, without taking memory."""

    def build() -> CausalLM:
        layers = [family.build_layer(model_config, index, dtype) for index in part.layers]
        declared = CausalLM(family.build_frame(model_config, dtype, hidden_dtype), layers)
        declare_quantized(declared, lambda path, num_inputs: scheme_of(_name_in_whole(path, part), num_inputs))
        if KV_CACHE_DTYPES[config.cache.cache_dtype] == "int8":
            declare_cache_scales(declared)
        return declared

    model: CausalLM = nnx.eval_shape(build)
    return model


def _filled(model: CausalLM, part: ModelPart, make: Callable[[str, Any], Any]) -> CausalLM:
    """Replaces the declarations that the part holds by make(name in the whole model, declaration).

    In the order of the names: numbers come before their scales.

    Raises:
      ConfigError: Inputs that share a scale would be on several devices.
    """
    graph_def, state = nnx.split(model)
    parameters = dict(nnx.to_flat_state(state))
    for path, name in _held(model, part, parameters):
        try:
            parameters[path] = parameters[path].replace(make(name, parameters[path]))
        except UndividedError as error:
            raise ConfigError(
                f"{name} can't be shared between devices: {error}; set a smaller --tensor-parallel-size or "
                "--quantization int8_wo"
            ) from error
    return nnx.merge(graph_def, nnx.from_flat_state(parameters))


def _num_bytes(model: CausalLM, part: ModelPart) -> int:
    parameters = dict(nnx.to_flat_state(nnx.split(model)[1]))
    held = [parameters[path].get_value() for path, _ in _held(model, part, parameters)]
    return sum(value.size * value.dtype.itemsize for value in held)


def _held(model: CausalLM, part: ModelPart, paths: Iterable[tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yields those paths of a declared part that it holds, each with its name in the whole model."""
    for path in paths:
        if path[0] == "layers" or part.holds(model.frame, path[1]):
            yield path, _name_in_whole(".".join(map(str, path)), part)


def _name_in_whole(name: str, part: ModelPart) -> str:
    """Returns a parameter's name in the whole model, of the one in a part, whose layers count from 0."""
    kind, place, *rest = name.split(".")
    return ".".join((kind, str(part.layers[int(place)]), *rest)) if kind == "layers" else name
