"""Hugging Face folders: config.json and safetensors files, read one tensor at a time.

Every size in a header is checked against the file's real size when the folder is opened, so a truncated or
missing shard is found before anything is loaded. Doesn't know what the tensors mean.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import ml_dtypes
import numpy as np

from jaxllm.exceptions import ModelLoadError, UnsupportedModelError
from jaxllm.model_loader.model_files import (
    PICKLE_SUFFIXES,
    parse_json_object,
    read_json,
    refuse_lfs_pointer,
    refuse_link_out,
)
from jaxllm.model_loader.model_folder import ModelFolder

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS = 8
FLOATS = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Of quantized weights, which mean nothing without their scales.
NUMBERS = {
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}


class StoredTensor(NamedTuple):
    """Where a tensor lies."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    num_bytes: int


class HuggingFaceCheckpoint(ModelFolder):
    """Implements checkpoint.Checkpoint on a folder.

    Args:
      path: The folder.
      dtypes: What its tensors may be, by the format's own names.

    Raises:
      ModelLoadError: A file is missing, truncated or contradicts another.
      UnsupportedModelError: A tensor's type is one that isn't read.
    """

    def __init__(self, path: Path, dtypes: Mapping[str, np.dtype] = FLOATS) -> None:
        super().__init__(path)
        self._tensors = _find_tensors(path, dtypes)

    def tensor_names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor in its stored dtype.

        Raises:
          ModelLoadError: The file ends inside the tensor (it shrank since it was opened).
        """
        tensor = self._tensors[name]
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            data = np.fromfile(file, dtype=np.uint8, count=tensor.num_bytes)
        if data.size != tensor.num_bytes:
            raise ModelLoadError(f"{tensor.path}: tensor {name!r}: expected {tensor.num_bytes} bytes, got {data.size}")
        return data.view(tensor.dtype).reshape(tensor.shape)


def read_header(path: Path, dtypes: Mapping[str, np.dtype] = FLOATS) -> dict[str, StoredTensor]:
    """Reads and checks one safetensors file's header.

    Raises:
      ModelLoadError: The file is truncated, damaged, or no safetensors file.
      UnsupportedModelError: A tensor's type is one that isn't read.
    """
    refuse_link_out(path)
    refuse_lfs_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise ModelLoadError(
                f"{path}: is truncated or not a safetensors file: expected a header of {header_bytes} bytes, "
                f"got a file of {size}"
            )
        header = parse_json_object(file.read(header_bytes), f"{path}: the header", is_unique=True)
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    tensors = {name: _parse_entry(path, name, entry, data_start, dtypes) for name, entry in header.items()}
    _check_layout(path, tensors, data_start, size)
    return tensors


def _parse_entry(path: Path, name: str, entry: Any, data_start: int, dtypes: Mapping[str, np.dtype]) -> StoredTensor:
    where = f"{path}: tensor {name!r:.200}"
    if not isinstance(entry, dict):
        raise ModelLoadError(f"{where}: the header's entry must be an object, got {entry!r:.80}")
    shape, offsets, dtype_name = entry.get("shape"), entry.get("data_offsets"), entry.get("dtype")
    if not _is_sizes(shape, range(MAX_DIMS + 1)) or not _is_sizes(offsets, range(2, 3)):
        raise ModelLoadError(f"{where}: shape and data_offsets are damaged: {shape!r:.80}, {offsets!r:.80}")
    if not isinstance(dtype_name, str) or dtype_name not in dtypes:
        raise UnsupportedModelError(
            f"{where}: is stored as {dtype_name!r:.40}, which is not read; supported: {', '.join(dtypes)}"
        )
    dtype = dtypes[dtype_name]
    num_bytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != num_bytes:
        raise ModelLoadError(f"{where}: expected {num_bytes} bytes for shape {shape}, got data_offsets {offsets}")
    return StoredTensor(path, dtype, tuple(shape), data_start + offsets[0], num_bytes)


def _is_sizes(value: Any, lengths: range) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) not in lengths:
        return False
    return all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_layout(path: Path, tensors: dict[str, StoredTensor], data_start: int, size: int) -> None:
    """Checks that the tensors fill the file, without gap, overlap or rest."""
    position = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if tensor.start != position:
            raise ModelLoadError(
                f"{path}: tensor {name!r:.200} overlaps its neighbour or leaves a gap: expected it at byte "
                f"{position}, got {tensor.start}"
            )
        position += tensor.num_bytes
    if position != size:
        raise ModelLoadError(f"{path}: is truncated or damaged: expected {position} bytes by its header, got {size}")


def _find_tensors(folder: Path, dtypes: Mapping[str, np.dtype]) -> dict[str, StoredTensor]:
    index_path = folder / INDEX_NAME
    if index_path.exists():
        return _read_shards(folder, _weight_map(index_path), dtypes)
    single = folder / "model.safetensors"
    if single.exists():
        return read_header(single, dtypes)
    others = sorted(folder.glob("*.safetensors"))
    if not others:
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
        hint = f"; {pickles[0]} is a pickle, which can run code, and is never read" if pickles else ""
        raise ModelLoadError(f"{folder}: has a config.json but no *.safetensors file{hint}")
    tensors: dict[str, StoredTensor] = {}
    for path in others:
        header = read_header(path, dtypes)
        if repeated := tensors.keys() & header.keys():
            raise ModelLoadError(f"{path}: tensor {min(repeated)!r:.200} is in another file of the folder too")
        tensors |= header
    return tensors


def _weight_map(index_path: Path) -> dict[str, str]:
    """Returns the index's tensor name -> file name; the files are names in the same folder."""
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index_path}: weight_map must be an object with at least one tensor")
    for file_name in weight_map.values():
        is_plain = isinstance(file_name, str) and Path(file_name).name == file_name and "\0" not in file_name
        if not is_plain or not file_name.endswith(".safetensors"):
            raise ModelLoadError(
                f"{index_path}: weight_map must name *.safetensors files beside it, got {file_name!r:.80}"
            )
    return weight_map


def _read_shards(folder: Path, weight_map: dict[str, str], dtypes: Mapping[str, np.dtype]) -> dict[str, StoredTensor]:
    shard_names = sorted(set(weight_map.values()))
    missing = [name for name in shard_names if not (folder / name).exists()]
    if missing:
        raise ModelLoadError(
            f"{folder}: expected the {len(shard_names)} files named by {INDEX_NAME}, {missing[0]!r:.200} is missing "
            f"({len(shard_names) - len(missing)} found); download the folder again"
        )
    headers = {name: read_header(folder / name, dtypes) for name in shard_names}
    for tensor_name, shard_name in weight_map.items():
        if tensor_name not in headers[shard_name]:
            raise ModelLoadError(
                f"{folder / shard_name}: expected tensor {tensor_name!r:.200} by {INDEX_NAME}, it is not there"
            )
    return {tensor_name: headers[shard_name][tensor_name] for tensor_name, shard_name in weight_map.items()}
