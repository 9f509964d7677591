"""Checks that a folder of weights is exactly what Orbax wrote for a manifest, before Orbax is let at it.

The weights are an Orbax checkpoint of uncompressed zarr arrays: a folder for each, with its shards' raw bytes in files
whose number and sizes follow from the manifest. Anything else is refused: a file too many, a file of another size, a
compressed array, a link, a field that asks for memory or for a path. So nothing that is read later can be larger than
what lies on the disk, or lie elsewhere. Imports no jax.
"""

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from jaxllm.exceptions import ModelLoadError
from jaxllm.intmath import cdiv
from jaxllm.model_loader.model_files import MAX_JSON_BYTES, read_json
from jaxllm.model_loader.orbax_manifest import DTYPES, Manifest, StoredWeight

MAX_SHARDS = 1 << 16
MAX_ARRAY_JSON_BYTES = 1 << 16
ARRAY_NAME = ".zarray"
TREE_NAME = "_METADATA"
PROCESSES_NAME = "array_metadatas"
_SMALL_FILES = ("_METADATA", "_CHECKPOINT_METADATA", "_sharding", "commit_success.txt")
_PROCESS_FILE = re.compile(r"process_[0-9]{1,6}", re.ASCII)
_DICT_KEY = 2  # Orbax's number for a key of a dict


def check_weights(folder: Path, manifest: Manifest) -> None:
    """Checks every file of the folder without reading a weight.

    Raises:
      ModelLoadError: The folder holds something else than the manifest says.
    """
    for name, is_folder, size in _entries(folder):
        if not is_folder and name in _SMALL_FILES:
            _check_small(folder / name, size)
        elif is_folder and name == PROCESSES_NAME:
            _check_processes(folder / name)
        elif not is_folder or name not in manifest.weights:
            raise ModelLoadError(f"{folder / name}: doesn't belong to a converted model; convert the model again")
    _check_tree(folder / TREE_NAME, manifest)
    for name, weight in manifest.weights.items():
        _check_array(folder / name, weight)


def _entries(folder: Path) -> Iterator[tuple[str, bool, int]]:
    """Yields (name, whether it is a folder, bytes) of what lies in a folder that is no link itself.

    Raises:
      ModelLoadError: The folder isn't there, or something in it is a link or no ordinary file.
    """
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise ModelLoadError(f"{folder}: must be a folder, not a file or a link")
        with os.scandir(folder) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
                    raise ModelLoadError(f"{entry.path}: must be an ordinary file or folder, links are not followed")
                yield entry.name, stat.S_ISDIR(status.st_mode), status.st_size
    except OSError as error:
        raise ModelLoadError(
            f"{folder}: can't be read: {error.strerror or error}; the model is incomplete, convert it again"
        ) from error


def _check_small(path: Path, size: int) -> None:
    if size > MAX_JSON_BYTES:
        raise ModelLoadError(f"{path}: may have at most {MAX_JSON_BYTES} bytes, got {size}")


def _check_processes(folder: Path) -> None:
    for name, is_folder, size in _entries(folder):
        if is_folder or not _PROCESS_FILE.fullmatch(name):
            raise ModelLoadError(f"{folder / name}: doesn't belong to a converted model; convert the model again")
        _check_small(folder / name, size)


def _check_tree(path: Path, manifest: Manifest) -> None:
    """Checks the file by which Orbax finds the arrays: it must name the manifest's weights, each by its own name."""
    metadata = read_json(path)
    tree = metadata.get("tree_metadata")
    if metadata.get("use_ocdbt") is not False or metadata.get("use_zarr3") is not False or not isinstance(tree, dict):
        raise ModelLoadError(f"{path}: must describe plain zarr arrays; convert the model again")
    names = {_name_in_tree(entry) for entry in tree.values()}
    if len(tree) != len(manifest.weights) or names != manifest.weights.keys():
        raise ModelLoadError(
            f"{path}: must name the {len(manifest.weights)} weights of the manifest and nothing else, got {len(tree)}"
        )


def _name_in_tree(entry: Any) -> str | None:
    """Returns the weight that an entry of the tree stands for; None where it is anything but an array in a dict."""
    if not isinstance(entry, dict):
        return None
    keys, value = entry.get("key_metadata"), entry.get("value_metadata")
    if not isinstance(value, dict) or value.get("value_type") != "jax.Array" or value.get("skip_deserialize"):
        return None
    if not isinstance(keys, list) or len(keys) != 1 or not isinstance(keys[0], dict):
        return None
    name = keys[0].get("key")
    return name if isinstance(name, str) and keys[0].get("key_type") == _DICT_KEY else None


def _check_array(folder: Path, weight: StoredWeight) -> None:
    array = _read_array_json(folder / ARRAY_NAME)
    chunks = array.pop("chunks", None)
    expected = {
        "shape": list(weight.shape),
        "dtype": _zarr_dtype(weight.dtype),
        "compressor": None,
        "filters": None,
        "fill_value": None,
        "order": "C",
        "dimension_separator": ".",
        "zarr_format": 2,
    }
    if array != expected:
        wrong = next(name for name in {**expected, **array} if array.get(name) != expected.get(name))
        raise ModelLoadError(
            f"{folder / ARRAY_NAME}: expected {wrong} {expected.get(wrong)!r}, got {array.get(wrong)!r:.80}; "
            "convert the model again"
        )
    _check_chunks(folder, weight, chunks)


def _read_array_json(path: Path) -> dict[str, Any]:
    """Reads an array's description, in which no name may stand twice: readers differ in which one they take.

    Raises:
      ModelLoadError: It is missing or damaged.
    """
    names: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names.extend(name for name, _ in pairs)
        return dict(pairs)

    try:
        data = path.read_bytes() if path.stat().st_size <= MAX_ARRAY_JSON_BYTES else b""
        array = json.loads(data.decode("utf-8"), object_pairs_hook=note)
    except OSError as error:
        raise ModelLoadError(f"{path}: can't be read: {error.strerror or error}; convert the model again") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: is not the description of an array; convert the model again") from error
    if not isinstance(array, dict) or len(names) != len(set(names)):
        raise ModelLoadError(f"{path}: must be one JSON object with each name once; convert the model again")
    return array


def _check_chunks(folder: Path, weight: StoredWeight, chunks: Any) -> None:
    """Checks that the shards' files are there, and are as large as shards of shape `chunks` are."""
    shape = weight.shape
    has_sizes = isinstance(chunks, list) and len(chunks) == len(shape) and all(type(size) is int for size in chunks)
    if not has_sizes or not all(1 <= chunk <= size for chunk, size in zip(chunks, shape, strict=True)):
        raise ModelLoadError(f"{folder / ARRAY_NAME}: chunks must divide the shape {list(shape)}, got {chunks!r:.80}")
    grid = [cdiv(size, chunk) for size, chunk in zip(shape, chunks, strict=True)]
    if math.prod(grid) > MAX_SHARDS:
        raise ModelLoadError(f"{folder}: may have at most {MAX_SHARDS} shards, got {math.prod(grid)}")
    num_bytes = math.prod(chunks) * DTYPES[weight.dtype].itemsize
    expected = {".".join(map(str, index)) or "0": num_bytes for index in product(*map(range, grid))}
    found = {name: -1 if is_folder else size for name, is_folder, size in _entries(folder) if name != ARRAY_NAME}
    if found != expected:
        wrong = next(name for name in {**expected, **found} if found.get(name) != expected.get(name))
        raise ModelLoadError(
            f"{folder / wrong}: expected {expected.get(wrong, 'no such file')}, got {found.get(wrong, 'no file')} "
            "(bytes); the model is damaged, convert it again"
        )


def _zarr_dtype(name: str) -> str:
    return "bfloat16" if name == "bfloat16" else DTYPES[name].str
