"""Each notebook runs from its first cell to its last, as a user runs it, here on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxllm import envs

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
_RUN = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": sys.argv[3]}}).execute()
nbformat.write(notebook, sys.argv[2])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", folder, ROOT], check=True)
    (built,) = folder.glob("jaxllm-*.whl")
    return built


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> str:
    return "".join("".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout")


def test_both_are_here() -> None:
    assert [path.name for path in NOTEBOOKS] == ["colab_tpu.ipynb", "kaggle_tpu.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_clean_and_begins_with_the_installation(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = code_cells(notebook)
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    first = "".join(cells[0]["source"])
    assert '%pip install -q "{package}[tpu,serve,grpc]"' in first and '"NOTEBOOK_PACKAGE", "jaxllm"' in first
    assert "%pip" not in "".join("".join(cell["source"]) for cell in cells[1:])


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, wheel: Path, smollm2_path: Path, tmp_path: Path) -> None:
    executed = tmp_path / "executed.ipynb"
    packages = tmp_path / "packages"
    packages.mkdir()
    environment = {
        **os.environ,
        "JAXLLM_HOME": str(envs.home()),
        "NOTEBOOK_PACKAGE": str(wheel),
        # The dependencies are here; the package itself goes where it does no harm, and is found there first.
        "PIP_NO_DEPS": "1",
        "PIP_TARGET": str(packages),
        "PYTHONPATH": str(packages),
    }
    command = [sys.executable, "-c", _RUN, path, executed, tmp_path]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    outputs = [printed(cell) for cell in code_cells(json.loads(executed.read_text(encoding="utf-8")))]
    install, check, generate, chat, stream, serve, openai_chat, openai_stream, grpc_stream, free = outputs
    assert (packages / "jaxllm" / "entrypoints" / "grpc_server" / "protos" / "jaxllm.proto").exists()
    assert "JAX" in check and "1, 2, 3, 4," in generate and "Paris" in generate
    assert len(stream) > 20 and "serving ['smollm2']" in serve
    # One model, greedy: whichever door the question takes, the answer is one.
    assert len(chat) > 20 and chat == openai_chat == openai_stream == grpc_stream
    assert free == "exit code 0\n"
