"""A model's weights as the loader brings them, by their names."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.engine_args import EngineArgs
from jaxllm.model_loader.checkpoint import open_model
from jaxllm.model_loader.loader import load_model
from sharding.mesh import make_mesh


def load_weights(path: Path, dtype: str = "float32", num_devices: int = 1, **engine_args: Any) -> dict[str, np.ndarray]:
    """Loads a model onto the first devices and returns each parameter, laid out for them."""
    args = EngineArgs(model=str(path), dtype=dtype, tensor_parallel_size=num_devices, **engine_args)
    config = args.create_engine_config(open_model(args.model, args.load_format))
    mesh = make_mesh(jax.local_devices()[:num_devices])
    model = load_model(config, mesh, jnp.dtype(dtype), jnp.dtype(dtype))
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, name)): np.asarray(parameter.get_value()) for name, parameter in flat}


def assert_equal(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    """Compares names, dtypes, shapes and every bit."""
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert (values.dtype, values.shape) == (second[name].dtype, second[name].shape), name
        assert values.tobytes() == second[name].tobytes(), name
