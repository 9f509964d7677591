"""The host side never imports the device side: a server can start without touching an accelerator."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOST_MODULES = (
    "jaxllm",
    "jaxllm.entrypoints.llm",
    "jaxllm.engine.llm_engine",
    "jaxllm.engine.async_llm_engine",
    "jaxllm.engine.engine_core_proc",
    "jaxllm.scheduler.scheduler",
    "jaxllm.generate",
    "jaxllm.serve",
    "jaxllm.entrypoints.openai.http_server",
)
DEVICE_PACKAGES = ("jax", "jaxlib", "flax", "pallas_kernels", "sharding")


@pytest.mark.parametrize("module", HOST_MODULES)
def test_importing_it_leaves_the_device_side_alone(module: str) -> None:
    code = f"import sys, {module}; print(*[name for name in {DEVICE_PACKAGES} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip() == ""
