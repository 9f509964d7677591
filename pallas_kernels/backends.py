"""Which implementation of each kernel runs. Knows platforms and names, no kernel.

| backend | what it is | where it is the default |
|---|---|---|
| tpu | Pallas, compiled by Mosaic | TPU v4 and newer |
| triton | Pallas, compiled by Triton | NVIDIA GPUs from Ampere (compute capability 8.0) on |
| xla | plain XLA | CPUs, older GPUs and older TPUs |
| reference | the definition of correct, slow | nowhere |

The environment variable JAXLLM_ATTENTION names a backend and goes before the default. The KV cache's layout depends
on the backend, so all kernels of one process share the choice.
"""

import os

import jax

BACKENDS = ("tpu", "triton", "xla", "reference")
BACKEND_VARIABLE = "JAXLLM_ATTENTION"
_OLD_TPUS = ("TPU v2", "TPU v3")  # their SMEM holds 16 KiB: no block tables
_FIRST_TRITON_CAPABILITY = 8.0


def choose_backend(backend: str | None = None) -> str:
    """Returns the backend to use: the one asked for, else JAXLLM_ATTENTION's, else the platform's default.

    Raises:
      ValueError: There is no such backend.
    """
    name = backend or os.environ.get(BACKEND_VARIABLE)
    if not name:
        device = jax.local_devices()[0]
        return default_backend(
            device.platform, device.device_kind, device.compute_capability if device.platform == "gpu" else None
        )
    if name not in BACKENDS:
        source = "backend" if backend else BACKEND_VARIABLE
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, got {name!r}")
    return name


def default_backend(platform: str, device_kind: str, compute_capability: str | None = None) -> str:
    """Returns the backend of a device by its platform ("cpu", "gpu" or "tpu") and what JAX says it is.

    >>> default_backend("tpu", "TPU v6 lite"), default_backend("gpu", "Tesla T4", "7.5")
    ('tpu', 'xla')
    """
    if platform == "tpu" and device_kind not in _OLD_TPUS:
        return "tpu"
    if platform == "gpu" and compute_capability and float(compute_capability) >= _FIRST_TRITON_CAPABILITY:
        return "triton"
    return "xla"


def describe_backends() -> str:
    """Returns one line: the backend in use and why."""
    device = jax.local_devices()[0]
    chosen = choose_backend()
    reason = f"{BACKEND_VARIABLE}={chosen}" if os.environ.get(BACKEND_VARIABLE) else f"default of {device.device_kind}"
    return f"kernel backend {chosen} ({reason}); available: {', '.join(BACKENDS)}"
