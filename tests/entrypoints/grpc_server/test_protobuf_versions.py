"""The server and the client work with every major version of protobuf that users have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# None of these uses generated code, which belongs to one major version.
TESTS = (
    "tests/test_client.py",
    *(f"tests/entrypoints/grpc_server/test_{name}.py" for name in ("convert", "vllm_service")),
)


@pytest.mark.slow
@pytest.mark.parametrize("version", [5, 6, 7])
def test_with_protobuf(version: int, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", tmp_path, f"protobuf=={version}.*"], check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = "import google.protobuf; print(google.protobuf.__version__.split('.')[0])"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == str(version)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    result = subprocess.run(command, env=environment, cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:]
    assert " passed" in result.stdout
