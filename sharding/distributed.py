"""Several processes as one JAX job: how they meet, what each of them drives, and a number they agree on.

Call `initialize` before anything else touches JAX's devices; afterwards `jax.devices()` are those of all processes, in
the order of the process ids. On CPU the processes' collectives go through gloo. The port where process 0 waits for the
others knows no password: it belongs on a trusted network, or on the loopback address.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

# Whoever started the processes watches them; a job must not end because the whole machine stood still for a while.
_HEARTBEAT_TIMEOUT_S = 3600
_JOIN_TIMEOUT_S = 300
_LEAVE_TIMEOUT_S = 10


def initialize(coordinator: str, num_processes: int, process_id: int, device_ids: Sequence[int]) -> None:
    """Joins the job, and returns when all processes have.

    Args:
      coordinator: "host:port" where process 0 listens.
      num_processes: Of the job.
      process_id: Of this process, from 0.
      device_ids: Of this machine's devices those that this process drives. On CPU only their number counts; a TPU
        host's process drives all chips.

    Raises:
      RuntimeError: The others don't come, or JAX's devices are in use already.
    """
    jax.config.update("jax_num_cpu_devices", len(device_ids))
    if num_processes == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        list(device_ids),
        initialization_timeout=_JOIN_TIMEOUT_S,
        heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S,
        shutdown_timeout_seconds=_LEAVE_TIMEOUT_S,
        coordinator_bind_address=coordinator,
    )


def shutdown() -> None:
    """Leaves the job once all others do. Does nothing where there is none."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def num_devices() -> int:
    """Returns how many devices all processes have together."""
    return jax.device_count()


def agree_on_min(value: int) -> int:
    """Returns the smallest of the processes' values, which are below 2**31. All must call it."""
    if jax.process_count() == 1:
        return value
    return int(np.min(multihost_utils.process_allgather(np.int32(value))))
