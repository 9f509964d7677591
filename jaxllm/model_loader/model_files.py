"""Checks that every model file passes before it is parsed: its kind, Git LFS pointers, JSON.

Knows nothing of what a checkpoint holds.
"""

import json
import stat
from collections import Counter
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
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its other end
            raise ModelLoadError(f"{path}: can't be read: it is no regular file")
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise ModelLoadError(f"{path}: can't be read: {error.strerror or error}") from error
    if head.startswith(_LFS_MAGIC):
        fields = dict(line.split(b" ", 1) for line in head.splitlines() if b" " in line)
        expected = fields.get(b"size", b"?")[:20].decode("ascii", "replace")
        raise ModelLoadError(
            f"{path}: is a Git LFS pointer, not the file itself: expected {expected} bytes, got {status.st_size}; "
            "run `git lfs pull` in that folder"
        )


def find_file(folder: Path, name: str) -> Path | None:
    """Returns a file of a model's folder, or None where there is none by that name."""
    path = folder / name
    return path if path.exists() else None


def refuse_link_out(path: Path) -> None:
    """Refuses a link that leads out of its folder; in the hub's cache one may lead to the model's blobs.

    Raises:
      ModelLoadError: It does.
    """
    try:
        folder, target = path.parent.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # links that lead to each other
        raise ModelLoadError(f"{path}: can't be read: {reason_of(error)}") from error
    roots = [folder]
    # models--org--name/snapshots/COMMIT/config.json is a link to models--org--name/blobs/HASH.
    if folder.parent.name == "snapshots":
        roots.append(folder.parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in roots):
        raise ModelLoadError(f"{path}: is a link that leads out of its folder; put the file itself there")


def read_limited(path: Path, max_bytes: int) -> bytes:
    """Reads a whole file of a model's folder.

    Raises:
      ModelLoadError: It is larger than allowed, a Git LFS pointer, a link out of the folder, or can't be read.
    """
    refuse_link_out(path)
    refuse_lfs_pointer(path)
    size = path.stat().st_size
    if size > max_bytes:
        raise ModelLoadError(f"{path}: may have at most {max_bytes} bytes, got {size}")
    return path.read_bytes()


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; NaN and Infinity are refused.

    Raises:
      ModelLoadError: The file is missing, too large, or not a JSON object.
    """
    return parse_json_object(read_limited(path, MAX_JSON_BYTES), str(path))


def reason_of(error: BaseException) -> str:
    """Returns what a library said of a file, as one printable line."""
    line = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return line if line.isprintable() else repr(line)


def parse_json_object(data: bytes, where: str, is_unique: bool = False) -> dict[str, Any]:
    """Parses one JSON object; `where` begins the error message, `is_unique` refuses a name that stands there twice.

    Raises:
      ModelLoadError: Not UTF-8, not JSON, nested too deeply, or not an object.
    """
    try:
        hook = _refuse_repeated if is_unique else None
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=hook)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{where}: is not valid JSON: {reason_of(error)}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{where}: must be a JSON object, got {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r:.80} appears twice")
    return value
