"""Measures how a model is loaded: how long it takes, and how much memory beyond what the weights take."""

import time
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxllm.config import EngineConfig
from jaxllm.model_loader.loader import load_model
from jaxllm.worker.plan import hidden_dtype_of
from jaxllm.worker.worker import compute_dtype
from sharding.mesh import make_mesh

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class LoadTime:
    """One load.

    Attributes:
      seconds: From the first look at the checkpoint to the last weight on its device.
      cpu_seconds: Processor time of it, all threads together.
      num_bytes: Of the weights, as they are held.
      peak_bytes: Most that the process held meanwhile beyond what it held before; None where the system does not say.
    """

    seconds: float
    cpu_seconds: float
    num_bytes: int
    peak_bytes: int | None


def measure_load(config: EngineConfig) -> LoadTime:
    """Loads a model as a worker does, on as many devices as its parallel sizes say.

    Raises:
      ModelLoadError: The checkpoint is damaged or doesn't fit its config.
    """
    platform = jax.default_backend()
    dtype = compute_dtype(config.dtype, platform)
    mesh = make_mesh(jax.devices()[: config.parallel.tensor_parallel_size])
    held = _status_bytes("VmRSS")
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    model = load_model(config, mesh, dtype, hidden_dtype_of(dtype, platform))
    leaves = jax.block_until_ready(jax.tree.leaves(model))
    seconds, cpu_seconds = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    peak = _status_bytes("VmHWM")
    peak_bytes = None if peak is None or held is None else peak - held
    return LoadTime(seconds, cpu_seconds, sum(leaf.nbytes for leaf in leaves), peak_bytes)


def _status_bytes(field: str) -> int | None:
    """Returns a field of Linux's account of this process; None elsewhere."""
    if not _STATUS.exists():
        return None
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines[field].split()[0]) * 1024
