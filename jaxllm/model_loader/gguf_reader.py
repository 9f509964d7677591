"""Reads GGUF files: metadata, the tensor table, and tensors de-quantised to float32.

Every size in a file is a claim, checked against the file's real size before anything is allocated, so a
truncated or hostile file ends in one ModelLoadError. The layout demanded is the one that writers produce
and llama.cpp insists on: tensors follow each other in the order of the table, padded to the alignment.

Doesn't know what the metadata means or how tensors are named: gguf_checkpoint.py does.
"""

import math
import struct
import typing
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxllm.exceptions import ModelLoadError, UnsupportedModelError
from jaxllm.intmath import round_up
from jaxllm.model_loader.gguf_dequantize import dequantized
from jaxllm.model_loader.model_files import refuse_lfs_pointer

MAX_METADATA_KEYS = 1 << 16
MAX_TENSORS = 10**6
MAX_DIMS = 4
MAX_STRING_BYTES = 1 << 26
MAX_ARRAY_ELEMENTS = 10**8
MAX_ALIGNMENT = 1 << 16
MAX_NAME_BYTES = 1 << 10

_Kind = TypeVar("_Kind", int, float, bool, str, list[str], np.ndarray)

SUPPORTED_TYPES = frozenset(
    GGMLQuantizationType[name] for name in "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K".split()
)

_SCALARS = {  # GGUF value type -> little-endian format
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MIN_KEY_BYTES = 8 + 4 + 1  # length, type, smallest value
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # length, number of dimensions, type, offset


class GGUFTensor(NamedTuple):
    """One row of the tensor table, checked."""

    name: str
    shape: tuple[int, ...]  # row-major: the file's dimensions reversed
    type: GGMLQuantizationType
    start: int  # bytes from the beginning of the file
    num_bytes: int


class GGUFFile:
    """An opened GGUF file: metadata in memory, tensors on disk.

    Attributes:
      path: The file.
      metadata: Key -> int, float, bool, str, numpy array (arrays of numbers) or list of str.
      tensors: Name -> GGUFTensor, in file order.

    Raises:
      ModelLoadError: The file is no GGUF file, damaged, or incomplete.
      UnsupportedModelError: A tensor's type is one that isn't read.
    """

    def __init__(self, path: Path) -> None:
        refuse_lfs_pointer(path)
        self.path = path
        with path.open("rb") as file:
            cursor = _Cursor(file, path, path.stat().st_size)
            num_tensors, num_keys = _read_preamble(cursor)
            self.metadata = _read_metadata(cursor, num_keys)
            self._metadata_end = cursor.position
            self._refuse_split()
            self.tensors = _read_tensor_table(cursor, num_tensors, self._alignment())

    def get(self, key: str, kind: type[_Kind]) -> _Kind | None:
        """Returns a metadata value, or None where the file has no such key. Integers also pass as floats.

        Raises:
          ModelLoadError: The value is of another kind.
        """
        value = self.metadata.get(key)
        if value is None or type(value) is (typing.get_origin(kind) or kind):
            return value
        if kind is float and type(value) is int:
            return kind(value)
        raise ModelLoadError(
            f"{self.path}: metadata {key!r} must be {kind.__name__}, got {type(value).__name__} ({value!r:.40})"
        )

    def require(self, key: str, kind: type[_Kind]) -> _Kind:
        """Returns a metadata value that the file must have.

        Raises:
          ModelLoadError: There is no such key, or its value is of another kind.
        """
        value = self.get(key, kind)
        if value is None:
            raise ModelLoadError(f"{self.path}: metadata {key!r} is missing")
        return value

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor as float32, `[*shape]`.

        Raises:
          ModelLoadError: The file ends inside the tensor (it shrank since it was opened).
        """
        tensor = self.tensors[name]
        return dequantized(_read_bytes(self.path, tensor, 0, tensor.num_bytes), tensor.type, tensor.shape)

    def rows(self, name: str) -> "GGUFRows":
        """Returns one matrix, of which nothing has been read yet."""
        return GGUFRows(self.path, self.tensors[name])

    def write_metadata(self, path: Path) -> None:
        """Writes a GGUF file with this one's metadata and no tensors."""
        with self.path.open("rb") as file:
            head = file.read(self._metadata_end)
        # Magic and version, the number of tensors, the number of keys and the keys.
        path.write_bytes(head[:8] + struct.pack("<Q", 0) + head[16:])

    def _refuse_split(self) -> None:
        num_parts = self.get("split.count", int) or 1
        if num_parts != 1:
            raise UnsupportedModelError(
                f"{self.path}: is one of {num_parts} parts of a split model; "
                "join them first with `llama-gguf-split --merge`"
            )

    def _alignment(self) -> int:
        alignment = self.get("general.alignment", int)
        if alignment is None:
            return 32
        if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ModelLoadError(
                f"{self.path}: general.alignment must be a power of two in [1, {MAX_ALIGNMENT}], got {alignment}"
            )
        return alignment


class GGUFRows:
    """A matrix [O, I] on disk: each slice of its rows is read when it is asked for, and is float32.

    Raises:
      ModelLoadError: The file ends inside the rows (it shrank since it was opened).
    """

    def __init__(self, path: Path, tensor: GGUFTensor) -> None:
        self._path, self._tensor = path, tensor
        self.shape = tensor.shape

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        row_bytes = self._tensor.num_bytes // self.shape[0]  # whole blocks
        data = _read_bytes(self._path, self._tensor, start * row_bytes, (stop - start) * row_bytes)
        return dequantized(data, self._tensor.type, (stop - start, *self.shape[1:]))


def _read_bytes(path: Path, tensor: GGUFTensor, offset: int, num_bytes: int) -> np.ndarray:
    with path.open("rb") as file:
        file.seek(tensor.start + offset)
        data = np.fromfile(file, dtype=np.uint8, count=num_bytes)
    if data.size != num_bytes:
        raise ModelLoadError(f"{path}: tensor {tensor.name!r}: expected {num_bytes} bytes, got {data.size}")
    return data


class _Cursor:
    """Reads forward through a file; a read past its end is a ModelLoadError."""

    __slots__ = ("_file", "path", "position", "size")

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self._file = file
        self.path = path
        self.position = 0
        self.size = size

    @property
    def num_left(self) -> int:
        return self.size - self.position

    def error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {message}")

    def require(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.num_left:
            raise self.error(
                f"the file is truncated or damaged: {what} at byte {self.position} needs {num_bytes} bytes, "
                f"{self.num_left} are left of {self.size}"
            )

    def take(self, num_bytes: int, what: str) -> bytes:
        self.require(num_bytes, what)
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise self.error(f"the file shrank while it was read: {what} at byte {self.position}")
        self.position += num_bytes
        return data

    def u32(self, what: str) -> int:
        return int(struct.unpack("<I", self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack("<Q", self.take(8, what))[0])

    def string(self, what: str, max_bytes: int = MAX_STRING_BYTES) -> str:
        length = self.u64(what)
        if length > max_bytes:
            raise self.error(f"{what} may have at most {max_bytes} bytes, got {length}")
        data = self.take(length, what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} ending at byte {self.position} is not UTF-8") from error


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Returns the numbers of tensors and of metadata keys."""
    if cursor.size < 4 or (magic := cursor.take(4, "the magic")) != b"GGUF":
        got = "an empty or tiny file" if cursor.size < 4 else repr(magic)
        raise cursor.error(f"is not a GGUF file: expected it to begin with b'GGUF', got {got}")
    version = cursor.u32("the version")
    if version not in (2, 3):
        if version and version & 0xFFFF == 0:
            raise cursor.error("is a big-endian GGUF file; only little-endian ones are read")
        raise cursor.error(f"GGUF version must be 2 or 3, got {version}")
    num_tensors = cursor.u64("the number of tensors")
    num_keys = cursor.u64("the number of metadata keys")
    if num_tensors > MAX_TENSORS or num_keys > MAX_METADATA_KEYS:
        raise cursor.error(
            f"may have at most {MAX_TENSORS} tensors and {MAX_METADATA_KEYS} metadata keys, "
            f"got {num_tensors} and {num_keys}"
        )
    cursor.require(num_tensors * _MIN_TENSOR_BYTES + num_keys * _MIN_KEY_BYTES, "the header")
    return num_tensors, num_keys


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string("a metadata key", MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.error(f"metadata key {key!r} appears twice")
        metadata[key] = _read_value(cursor, key)
    return metadata


def _read_value(cursor: _Cursor, key: str) -> Any:
    what = f"metadata {key!r}"
    value_type = cursor.u32(what)
    if value_type == _STRING:
        return cursor.string(what)
    if value_type == _ARRAY:
        return _read_array(cursor, what)
    return _read_numbers(cursor, value_type, 1, what)[0].item()


def _read_array(cursor: _Cursor, what: str) -> np.ndarray | list[str]:
    element_type = cursor.u32(what)
    length = cursor.u64(what)
    if length > MAX_ARRAY_ELEMENTS:
        raise cursor.error(f"{what} may have at most {MAX_ARRAY_ELEMENTS} elements, got {length}")
    if element_type != _STRING:
        return _read_numbers(cursor, element_type, length, what)
    cursor.require(8 * length, what)
    return [cursor.string(what) for _ in range(length)]


def _read_numbers(cursor: _Cursor, value_type: int, length: int, what: str) -> np.ndarray:
    if value_type not in _SCALARS:
        raise cursor.error(f"{what} has value type {value_type}, which is unknown or an array of arrays")
    dtype = np.dtype(_SCALARS[value_type])
    values = np.frombuffer(cursor.take(dtype.itemsize * length, what), dtype)
    if value_type != _BOOL:
        return values
    if np.any(values > 1):
        raise cursor.error(f"{what}: a boolean must be 0 or 1, got {values.max()}")
    return values.astype(np.bool_)


def _read_tensor_table(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
    """Reads the table and checks that its tensors fill the rest of the file, one after the other."""
    rows = [_read_tensor_row(cursor) for _ in range(num_tensors)]
    data_start = round_up(cursor.position, alignment)
    tensors: dict[str, GGUFTensor] = {}
    position = end = 0
    for row in rows:
        if row.name in tensors:
            raise cursor.error(f"tensor {row.name!r} appears twice")
        if row.start != position:
            raise cursor.error(
                f"tensor {row.name!r} overlaps its neighbour or leaves a gap: expected offset {position}, "
                f"got {row.start}"
            )
        tensors[row.name] = row._replace(start=data_start + row.start)
        end = position + row.num_bytes
        position = round_up(end, alignment)
    low, high = data_start + end, data_start + position
    if tensors and not low <= cursor.size <= high:
        raise cursor.error(
            f"the file is truncated or damaged: its tensors end at byte {low}, so expected "
            f"{low} to {high} bytes, got {cursor.size}"
        )
    return tensors


def _read_tensor_row(cursor: _Cursor) -> GGUFTensor:
    """Reads one row; `start` is still an offset into the data section."""
    name = cursor.string("a tensor name", MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    num_dims = cursor.u32(what)
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.error(f"{what} must have 1 to {MAX_DIMS} dimensions, got {num_dims}")
    shape = tuple(reversed(struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims, what))))
    tensor_type = _tensor_type(cursor, cursor.u32(what), what)
    offset = cursor.u64(what)
    block_size = GGML_QUANT_SIZES[tensor_type][0]
    if min(shape) < 1 or shape[-1] % block_size:
        raise cursor.error(
            f"{what}: each dimension must be at least 1 and the last a multiple of {block_size}, got {shape}"
        )
    num_bytes = _num_bytes(shape, tensor_type)
    if num_bytes > cursor.size:
        raise cursor.error(
            f"the file is truncated or damaged: {what} of shape {shape} needs {num_bytes} bytes, "
            f"the file has {cursor.size}"
        )
    return GGUFTensor(name, shape, tensor_type, offset, num_bytes)


def _tensor_type(cursor: _Cursor, number: int, what: str) -> GGMLQuantizationType:
    try:
        tensor_type = GGMLQuantizationType(number)
    except ValueError as error:
        raise cursor.error(f"{what} has the unknown type {number}") from error
    if tensor_type not in SUPPORTED_TYPES:
        names = ", ".join(sorted(supported.name for supported in SUPPORTED_TYPES))
        raise UnsupportedModelError(
            f"{cursor.path}: {what} is stored as {tensor_type.name}, which is not read; supported: {names}"
        )
    return tensor_type


def _num_bytes(shape: tuple[int, ...], tensor_type: GGMLQuantizationType) -> int:
    """Returns the stored size: 64 values of Q4_0 are two blocks of 18 bytes."""
    block_size, block_bytes = GGML_QUANT_SIZES[tensor_type]
    return math.prod(shape) // block_size * block_bytes
