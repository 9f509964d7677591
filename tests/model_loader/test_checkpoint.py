"""From the user's word to an opened checkpoint."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from jaxllm.exceptions import ModelLoadError, ModelNotFoundError
from jaxllm.model_loader import aliases, demo_models, hub
from jaxllm.model_loader.checkpoint import locate, open_checkpoint
from jaxllm.model_loader.gguf_checkpoint import GGUFCheckpoint
from jaxllm.model_loader.hub import parse_hub_id
from jaxllm.model_loader.model_files import PICKLE_SUFFIXES
from jaxllm.model_loader.safetensors_reader import HuggingFaceCheckpoint
from tests.fakes.tiny_models import micro_llama, write_tiny_folder, write_tiny_gguf


def test_files_and_folders(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "micro.gguf", micro_llama())
    folder = write_tiny_folder(tmp_path / "micro", micro_llama())
    assert isinstance(open_checkpoint(str(path)), GGUFCheckpoint)
    assert isinstance(open_checkpoint(str(folder)), HuggingFaceCheckpoint)
    assert open_checkpoint(str(folder)).path == folder


def test_an_existing_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny_folder(tmp_path / "smollm2", micro_llama())
    write_tiny_folder(tmp_path / "org" / "name", micro_llama())
    assert locate("smollm2") == Path("smollm2")
    assert locate("org/name") == Path("org/name")


def test_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_models, "fetch", lambda alias: Path(f"fetched-{alias}"))
    assert locate("smollm2") == Path("fetched-smollm2")
    assert locate("gemma3-270m") == Path("fetched-gemma3-270m")


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        ("llama-3.2-1b", ("meta-llama/Llama-3.2-1B", None)),
        ("Llama3.2:1b", ("meta-llama/Llama-3.2-1B", None)),
        ("qwen3:0.6b@main", ("Qwen/Qwen3-0.6B", "main")),
        ("gpt2", ("openai-community/gpt2", None)),
    ],
)
def test_short_names_of_hub_models(model: str, asked: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "fetch_snapshot", lambda *parsed, has_weights: parsed)
    assert locate(model) == asked


def test_short_names_are_written_in_one_way_and_lead_to_hub_ids() -> None:
    assert len(aliases._BY_KEY) == len(aliases.HUB_MODELS) + len(demo_models.DEMO_MODELS)
    assert all(name == name.lower() for name in aliases.HUB_MODELS)
    assert all(parse_hub_id(hub_id) == (hub_id, None) for hub_id in aliases.HUB_MODELS.values())


def test_a_slip_of_the_pen() -> None:
    for model, meant in (("smolm2", "smollm2"), ("lama-3.2-1b", "llama-3.2-1b"), ("qwen3-06b-", "qwen3-0.6b")):
        with pytest.raises(ModelNotFoundError, match=f"no model '{model}': did you mean {meant}. no such file"):
            locate(model)


@pytest.mark.parametrize("suffix", PICKLE_SUFFIXES)
def test_pickles_are_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    for _ in range(2):  # missing, then present
        with pytest.raises(ModelLoadError, match="are pickles, which can run code, and are never read"):
            open_checkpoint(str(path))
        path.write_bytes(b"cos\nsystem\n")


@pytest.mark.parametrize(
    "model",
    [
        "",
        "nothing",
        "no/such/model.gguf",
        "a.gguf",
        "org/name.gguf",
        "./x/y",
        "/nowhere",
        "../x",
        "a/b/c",
        "x\0y",
        "~nobody-here/x",
        "x" * 5000,
        "org/na me",
        "http://x/y",
    ],
)
def test_what_is_nowhere(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFoundError) as caught:
        open_checkpoint(model)
    message = str(caught.value)
    assert "\n" not in message and "smollm2" in message and "give a .gguf file" in message


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    for name, hint in (("w.pt", "w.pt is a pickle"), ("m.gguf", "it holds m.gguf: give that file")):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(ModelLoadError, match=f"it has no config.json; {hint}"):
            open_checkpoint(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match="is one file of a model; give the folder"):
        open_checkpoint(str(tmp_path / "model.safetensors"))


def test_hub_ids() -> None:
    assert parse_hub_id("org/name") == ("org/name", None)
    assert parse_hub_id("org/name@refs/pr/1") == ("org/name", "refs/pr/1")
    for other in ("name", "org/", "/name", "a/b/c", "org/name@", "../name", "org/name@a b", "org/naïve"):
        assert parse_hub_id(other) is None


def test_the_hub_is_asked_for_no_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    folder = write_tiny_folder(tmp_path / "snapshot", micro_llama())

    def download(repo_id: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_checkpoint("org/name@main").path == folder
    assert (asked["repo_id"], asked["revision"], asked["ignore_patterns"]) == ("org/name", "main", ["*/*"])
    assert asked["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]


def test_the_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo_id: str, **kwargs: Any) -> str:
        raise LocalEntryNotFoundError("no network\nand a long explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelNotFoundError) as caught:
        open_checkpoint("org/name")
    message = str(caught.value)
    assert "hub model 'org/name' could not be fetched" in message and "no network" in message
    assert "\n" not in message and "--model" in message


def _write_hub_cache(home: Path) -> Path:
    """Writes a model as huggingface_hub keeps it: a snapshot of links to blobs. Returns the snapshot."""
    source, folder = write_tiny_folder(home / "source", micro_llama(), num_shards=2), home / "hub" / "models--org--name"
    snapshot, blobs = folder / "snapshots" / ("0123456789" * 4), folder / "blobs"
    for new in (snapshot, blobs, folder / "refs"):
        new.mkdir(parents=True)
    (folder / "refs" / "main").write_text(snapshot.name)
    for number, file in enumerate(sorted(source.iterdir())):
        (blobs / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(number))
    return snapshot


def test_the_hubs_cache(tmp_path: Path) -> None:
    snapshot = _write_hub_cache(tmp_path)
    folder = snapshot.parent.parent
    for model in (snapshot, folder):
        checkpoint = open_checkpoint(str(model))
        assert checkpoint.path == snapshot
        assert isinstance(checkpoint, HuggingFaceCheckpoint) and checkpoint.read("model.norm.weight").shape == (8,)
    for text in ("../../source", "main", ""):
        (folder / "refs" / "main").write_text(text)
        with pytest.raises(ModelLoadError, match="models--org--name: expected a folder with config.json"):
            open_checkpoint(str(folder))


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_takes_what_is_cached(variable: str, tmp_path: Path) -> None:
    snapshot = _write_hub_cache(tmp_path)
    script = (
        "import socket, sys\n"
        "def refuse(*args, **kwargs): sys.exit('used a socket')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from jaxllm.model_loader.checkpoint import open_checkpoint\n"
        "print(open_checkpoint('org/name').path)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    environment |= {variable: "1", "HF_HOME": str(tmp_path), "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == f"{snapshot}\n", done.stderr


def test_offline_asks_nobody(tmp_path: Path) -> None:
    script = (
        "import socket, sys\n"
        "def refuse(*args, **kwargs): sys.exit('used a socket')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from jaxllm.model_loader.checkpoint import open_checkpoint\n"
        "from jaxllm.exceptions import ModelNotFoundError\n"
        "try:\n    open_checkpoint('org/name')\n"
        "except ModelNotFoundError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("hub model 'org/name' could not be fetched") and done.stdout.count("\n") == 1
