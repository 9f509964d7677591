"""A plan as lines of text: the mesh, what padding costs, and each stage's arrays with their shardings."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.config import EngineConfig
from jaxllm.worker.cache_engine import block_size_of
from jaxllm.worker.padding_cost import padding_costs
from jaxllm.worker.plan import StagePlan, plan_stages
from jaxllm.worker.worker import compute_dtype, mesh_devices
from sharding.mesh import make_mesh


def plan_report(config: EngineConfig) -> Iterator[str]:
    """Yields the plan of one replica on this machine's devices. Loads nothing.

    Raises:
      ConfigError: There are too few devices, or too many stages.
    """
    platform = jax.default_backend()
    dtype = compute_dtype(config.dtype, platform)
    mesh = make_mesh(mesh_devices(config, None), config.parallel.pipeline_parallel_size)
    yield f"mesh: {', '.join(f'{name} {size}' for name, size in mesh.shape.items())}, of {platform} devices"
    yield from padding_costs(config.model, config.parallel.tensor_parallel_size)
    for index, stage in enumerate(plan_stages(config, mesh, platform, dtype, num_blocks=1)):
        yield from _stage_lines(index, stage, block_size_of(config, platform))


def _stage_lines(index: int, stage: StagePlan, block_size: int) -> Iterator[str]:
    weights = _weights(stage)
    layers, devices = stage.part.layers, ", ".join(str(device.id) for device in stage.mesh.devices.ravel())
    num_bytes = sum(count * _device_bytes(weight) for weight, count in weights.values())
    kv_bytes = len(layers) * sum(_device_bytes(array) for array in stage.cache) // block_size
    yield (
        f"stage {index}: layers {layers.start} to {layers.stop - 1} on devices {devices}; on each "
        f"{num_bytes / 2**20:.1f} MiB of weights and {kv_bytes} bytes of KV cache a token"
    )
    for name, (weight, count) in weights.items():
        yield f"  {name}{f' x {count}' if count > 1 else ''}: {_describe(weight)}"
    for array in stage.cache:
        yield f"  KV cache x {len(layers)}: {_describe(array, 'N')}"


def _weights(stage: StagePlan) -> dict[str, tuple[Any, int]]:
    """Returns the stage's weights and how many there are of each, layers that are alike in one."""
    found: dict[str, tuple[Any, int]] = {}
    for path, parameter in nnx.to_flat_state(nnx.state(stage.model)):
        weight = parameter.get_value()
        if weight.sharding is not None:
            name = ".".join("*" if isinstance(key, int) else str(key) for key in path)
            if name in found and found[name][0].shape != weight.shape:
                name = ".".join(map(str, path))
            found[name] = (weight, found.get(name, (weight, 0))[1] + 1)
    return found


def _device_bytes(array: Any) -> int:
    return math.prod(array.sharding.shard_shape(array.shape)) * jnp.dtype(array.dtype).itemsize


def _describe(array: Any, first: object = None) -> str:
    """Says an array's shape, its part on each device, and how it is cut. `first` names a size that is still open."""
    whole, part = list(array.shape), list(array.sharding.shard_shape(array.shape))
    if first is not None:
        whole[0] = part[0] = first
    cut = [name for name in array.sharding.spec if name is not None]
    shape = f"{array.dtype} [{', '.join(map(str, whole))}]"
    if not cut:
        return f"{shape}, whole on every device"
    axes = ", ".join("None" if name is None else str(name) for name in array.sharding.spec)
    return f"{shape}, cut over ({axes}), [{', '.join(map(str, part))}] on each device"
