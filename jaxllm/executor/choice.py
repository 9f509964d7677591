"""Which executor a configuration gets. Checks what can be checked before anything is loaded."""

import glob
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
_TPU_DEVICES = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")


def choose_backend(parallel: ParallelConfig) -> str:
    """Returns the backend that was asked for; else "uni", whose one process drives all local devices.

    It is "ray" where RAY_ADDRESS names a cluster and this machine has too few devices.

    Raises:
      ConfigError: It isn't installed, or not for these devices.
    """
    backend = parallel.distributed_executor_backend
    if backend is None:
        needed = parallel.world_size * parallel.data_parallel_size
        has_cluster = needed > 1 and bool(os.environ.get("RAY_ADDRESS"))
        backend = "ray" if has_cluster and _count_local_devices() < needed else "uni"
    if backend == "ray" and not _is_installed("ray"):
        raise ConfigError(
            "distributed_executor_backend=ray needs Ray, which isn't installed; pip install 'jaxllm[ray]'"
        )
    if backend == "mp" and _has_tpus():
        raise ConfigError(
            "distributed_executor_backend=mp starts a process a device, but the TPU chips of a host belong to one "
            "process; leave it out, or set ray for several hosts"
        )
    return backend


def _has_tpus() -> bool:
    """Whether JAX would drive TPUs here; found out without touching them."""
    wanted = os.environ.get("JAX_PLATFORMS", "")
    is_wanted = not wanted or "tpu" in wanted.split(",")
    return is_wanted and _is_installed("libtpu") and any(glob.glob(pattern) for pattern in _TPU_DEVICES)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _count_local_devices() -> int:
    """Asks a process of its own, which gives the devices back when it ends."""
    code = "import jax; print(jax.local_device_count())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return int(result.stdout) if result.returncode == 0 else 0
