"""Checks that every model file passes before it is parsed: its kind, Git LFS pointers, JSON.

Knows nothing of what a checkpoint holds.
"""

import json
from pathlib import Path
from typing import Any, NoReturn

from jaxllm.exceptions import ModelLoadError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAX_JSON_BYTES = 1 << 26
_LFS_MAGIC = b"version https://git-lfs"


def refuse_pickle(path: Path) -> None:
    """Refuses formats that run code while they are read. There is no flag to allow them.

    Raises:
      ModelLoadError: The name ends like a pickle's.
    """
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise ModelLoadError(
            f"{path}: {path.suffix} files are pickles, which can run code, and are never read; "
            "give a .gguf file or a folder with config.json and *.safetensors"
        )


def refuse_lfs_pointer(path: Path) -> None:
    """Refuses the small text that Git leaves in place of a large file.

    Raises:
      ModelLoadError: The file is a Git LFS pointer, or can't be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(512)
        size = path.stat().st_size
    except OSError as error:
        raise ModelLoadError(f"{path}: can't be read: {error.strerror or error}") from error
    if head.startswith(_LFS_MAGIC):
        fields = dict(line.split(b" ", 1) for line in head.splitlines() if b" " in line)
        expected = fields.get(b"size", b"?")[:20].decode("ascii", "replace")
        raise ModelLoadError(
            f"{path}: is a Git LFS pointer, not the file itself: expected {expected} bytes, got {size}; "
            "run `git lfs pull` in that folder"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; NaN and Infinity are refused.

    Raises:
      ModelLoadError: The file is missing, too large, or not a JSON object.
    """
    refuse_lfs_pointer(path)
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ModelLoadError(f"{path}: a JSON file may have at most {MAX_JSON_BYTES} bytes, got {size}")
    return parse_json_object(path.read_bytes(), str(path))


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Parses one JSON object; `where` begins the error message.

    Raises:
      ModelLoadError: Not UTF-8, not JSON, nested too deeply, or not an object.
    """
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{where}: is not valid JSON: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{where}: must be a JSON object, got {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
