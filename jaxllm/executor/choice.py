"""Which executor a configuration gets. Checks what can be checked before anything is loaded."""

import importlib.util
import os
import subprocess
import sys

from jaxllm.config import ParallelConfig
from jaxllm.exceptions import ConfigError

EXECUTOR_CLASSES = {
    "uni": "jaxllm.executor.uniproc_executor:UniProcExecutor",
    "mp": "jaxllm.executor.multiproc_executor:MultiprocExecutor",
    "ray": "jaxllm.executor.ray_distributed_executor:RayDistributedExecutor",
    "external_launcher": "jaxllm.executor.external_launcher:ExecutorWithExternalLauncher",
}


def choose_backend(parallel: ParallelConfig) -> str:
    """Returns the backend that was asked for; else "uni", whose one process drives all local devices.

    It is "ray" where RAY_ADDRESS names a cluster and this machine has too few devices.

    Raises:
      ConfigError: It is asked for and not installed.
    """
    backend = parallel.distributed_executor_backend
    if backend is None:
        needed = parallel.world_size * parallel.data_parallel_size
        has_cluster = needed > 1 and bool(os.environ.get("RAY_ADDRESS"))
        backend = "ray" if has_cluster and _count_local_devices() < needed else "uni"
    if backend == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "distributed_executor_backend=ray needs Ray, which isn't installed; pip install 'jaxllm[ray]'"
        )
    return backend


def _count_local_devices() -> int:
    """Asks a process of its own, which gives the devices back when it ends."""
    code = "import jax; print(jax.local_device_count())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return int(result.stdout) if result.returncode == 0 else 0
