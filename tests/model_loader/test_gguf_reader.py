"""GGUF files: every kind of number they hold, and everything that can be wrong with them."""

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.exceptions import ModelLoadError, UnsupportedModelError
from jaxllm.model_loader.gguf_checkpoint import GGUFCheckpoint
from jaxllm.model_loader.gguf_dequantize import dequantized
from jaxllm.model_loader.gguf_reader import SUPPORTED_TYPES, GGUFFile
from tests.fakes.tiny_models import micro_llama, write_tiny_gguf


@pytest.fixture(scope="module")
def micro_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny_gguf(tmp_path_factory.mktemp("micro") / "micro.gguf", micro_llama()).read_bytes()


@pytest.fixture(scope="module")
def scratch_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "model.gguf"


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _tensor(name: str, dims: tuple[int, ...], offset: int, tensor_type: int = 0, num_dims: int | None = None) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    return _string(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, tensor_type, offset)


def _u32_key(key: str, value: int) -> bytes:
    return _string(key) + struct.pack("<II", 4, value)


def _file(path: Path, keys: list[bytes], tensors: list[bytes], num_data_bytes: int, version: int = 3) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys + tensors)
    padding = b"\0" * (-len(head) % 32)
    path.write_bytes(head + padding + b"\0" * num_data_bytes)
    return path


def _open_error(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        GGUFFile(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


@pytest.mark.parametrize("tensor_type", sorted(SUPPORTED_TYPES), ids=lambda tensor_type: tensor_type.name)
def test_dequantisation_equals_the_gguf_packages(tensor_type: GGMLQuantizationType, tmp_path: Path) -> None:
    block_size, block_bytes = GGML_QUANT_SIZES[tensor_type]
    rng = np.random.default_rng(tensor_type.value)
    raw = rng.integers(0, 256, (6, 512 // block_size * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("first", np.arange(3, dtype=np.float32))
    writer.add_tensor("x", raw, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    opened = GGUFFile(tmp_path / "x.gguf")
    with np.errstate(all="ignore"):  # random bytes hold NaN and overflow
        values, expected = opened.read("x"), gguf.quants.dequantize(raw, tensor_type)

    assert opened.tensors["x"].shape == (6, 512)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, expected.reshape(6, 512))
    np.testing.assert_array_equal(opened.read("first"), [0.0, 1.0, 2.0])
    rows = opened.rows("x")
    assert rows.shape == (6, 512)
    with np.errstate(all="ignore"):
        for part in (slice(0, 6), slice(2, 5), slice(5, 9)):
            np.testing.assert_array_equal(rows[part], values[part])


@pytest.mark.parametrize("name", ["F32", "Q4_1", "Q8_0"])
def test_dequantisation_piece_by_piece(name: str) -> None:
    """Five pieces of 131,072 elements, the last one short, whose borders fall inside rows."""
    tensor_type = GGMLQuantizationType[name]
    weight = np.random.default_rng(1).standard_normal((1700, 352)).astype(np.float32)
    stored = gguf.quants.quantize(weight, tensor_type)
    values = dequantized(np.ascontiguousarray(stored).view(np.uint8).reshape(-1), tensor_type, weight.shape)
    np.testing.assert_array_equal(values, gguf.quants.dequantize(stored, tensor_type))
    assert values.ctypes.data % 64 == 0


def test_metadata_of_every_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    expected: dict[str, Any] = {
        "a.u8": 255, "a.i8": -1, "a.u16": 65535, "a.i16": -2, "a.u32": 2**32 - 1, "a.i32": -3,
        "a.u64": 2**64 - 1, "a.i64": -(2**63), "a.f32": 0.5, "a.f64": 0.1, "a.true": True, "a.text": "héllo",
    }  # fmt: skip
    for key, add in (
        ("a.u8", writer.add_uint8), ("a.i8", writer.add_int8), ("a.u16", writer.add_uint16),
        ("a.i16", writer.add_int16), ("a.u32", writer.add_uint32), ("a.i32", writer.add_int32),
        ("a.u64", writer.add_uint64), ("a.i64", writer.add_int64), ("a.f32", writer.add_float32),
        ("a.f64", writer.add_float64), ("a.true", writer.add_bool), ("a.text", writer.add_string),
    ):  # fmt: skip
        add(key, expected[key])
    writer.add_array("a.numbers", [3, -4])
    writer.add_array("a.texts", ["x", "", "yz"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    metadata = GGUFFile(tmp_path / "x.gguf").metadata

    assert {key: metadata[key] for key in expected} == expected
    assert metadata["a.numbers"].tolist() == [3, -4]
    assert metadata["a.texts"] == ["x", "", "yz"]


def test_a_value_of_the_wrong_kind_is_named(tmp_path: Path) -> None:
    opened = GGUFFile(_file(tmp_path / "x.gguf", [_u32_key("size", 7)], [], 0))
    assert opened.get("size", int) == 7
    assert opened.get("size", float) == 7.0
    assert opened.get("nothing", str) is None
    with pytest.raises(ModelLoadError, match="metadata 'size' must be str, got int"):
        opened.get("size", str)
    with pytest.raises(ModelLoadError, match="metadata 'nothing' is missing"):
        opened.require("nothing", int)


def test_truncation_at_every_length(micro_bytes: bytes, scratch_path: Path) -> None:
    scratch_path.write_bytes(micro_bytes)
    for length in reversed(range(len(micro_bytes))):
        os.truncate(scratch_path, length)
        with pytest.raises(ModelLoadError) as caught:
            GGUFCheckpoint(scratch_path)
        assert "\n" not in str(caught.value)
    scratch_path.write_bytes(micro_bytes)
    assert GGUFCheckpoint(scratch_path).config["num_hidden_layers"] == 1


def test_truncation_of_the_real_model(smollm2_path: Path, scratch_path: Path) -> None:
    size = smollm2_path.stat().st_size
    with smollm2_path.open("rb") as file:
        # 14 lengths inside the metadata and the tensor table, 6 inside the tensors.
        lengths = [0, 3, 4, 8, 24, 25, 100, 1000, 9_000, 300_000, 900_000, 1_500_000, 1_700_000, 1_800_000]
        for length in [*lengths, 2_000_000, size // 4, size // 2, size - 40_000_000, size - 1000, size - 33]:
            file.seek(0)
            scratch_path.write_bytes(file.read(min(length, 2_000_000)))
            with scratch_path.open("r+b") as scratch:
                scratch.truncate(length)  # the rest is a hole, which reads as zeros
            assert str(scratch_path) in _open_error(scratch_path)


@settings(max_examples=400)
@given(flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_open_or_raise_model_load_error(
    micro_bytes: bytes, scratch_path: Path, flips: list[tuple[int, int]]
) -> None:
    damaged = bytearray(micro_bytes)
    for position, value in flips:
        damaged[position % len(damaged)] = value
    scratch_path.write_bytes(damaged)
    try:
        checkpoint = GGUFCheckpoint(scratch_path)
        with np.errstate(all="ignore"):
            for name in checkpoint.tensor_names():
                checkpoint.read(name)
    except ModelLoadError as error:
        assert "\n" not in str(error)


def test_a_claimed_number_of_dimensions(tmp_path: Path) -> None:
    path = _file(tmp_path / "x.gguf", [], [_tensor("x", (8,), 0, num_dims=2**32 - 1)], 32)
    assert "'x' must have 1 to 4 dimensions, got 4294967295" in _open_error(path)


@pytest.mark.parametrize("dims", [(0,), (2**63, 4), (2**32, 2**32), (2**64 - 1,)])
def test_claimed_dimensions(dims: tuple[int, ...], tmp_path: Path) -> None:
    assert "tensor 'x'" in _open_error(_file(tmp_path / "x.gguf", [], [_tensor("x", dims, 0)], 32))


@pytest.mark.parametrize("alignment", [0, 3, 2**17, 2**31])
def test_alignment_must_be_a_power_of_two(alignment: int, tmp_path: Path) -> None:
    path = _file(tmp_path / "x.gguf", [_u32_key("general.alignment", alignment)], [], 0)
    assert f"power of two in [1, 65536], got {alignment}" in _open_error(path)


@pytest.mark.parametrize(
    "offset, expected", [(0, "overlaps"), (16, "overlaps"), (64, "gap"), (2**64 - 32, "gap"), (2**63, "gap")]
)
def test_overlaps_and_gaps(offset: int, expected: str, tmp_path: Path) -> None:
    path = _file(tmp_path / "x.gguf", [], [_tensor("x", (8,), 0), _tensor("y", (8,), offset)], 64)
    message = _open_error(path)
    assert "tensor 'y'" in message and expected in message and f"expected offset 32, got {offset}" in message


def test_neighbouring_tensors_are_fine(tmp_path: Path) -> None:
    opened = GGUFFile(_file(tmp_path / "x.gguf", [], [_tensor("x", (8,), 0), _tensor("y", (8,), 32)], 64))
    assert [(tensor.start, tensor.num_bytes) for tensor in opened.tensors.values()] == [(96, 32), (128, 32)]


def test_bytes_after_the_last_tensor(tmp_path: Path) -> None:
    path = _file(tmp_path / "x.gguf", [], [_tensor("x", (8,), 0)], 33)
    assert "expected 96 to 96 bytes, got 97" in _open_error(path)


def test_repeated_names(tmp_path: Path) -> None:
    tensors = [_tensor("x", (8,), 0), _tensor("x", (8,), 32)]
    assert "tensor 'x' appears twice" in _open_error(_file(tmp_path / "x.gguf", [], tensors, 64))
    assert "key 'k' appears twice" in _open_error(_file(tmp_path / "y.gguf", [_u32_key("k", 1)] * 2, [], 0))


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**26 + 1, 1000])
def test_claimed_string_lengths(length: int, tmp_path: Path) -> None:
    key = _string("general.name") + struct.pack("<IQ", 8, length) + b"abc"
    assert str(length) in _open_error(_file(tmp_path / "x.gguf", [key], [], 64))


@pytest.mark.parametrize("element_type", [0, 8, 12])
@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**8 + 1, 10**8, 1000])
def test_claimed_array_lengths(element_type: int, length: int, tmp_path: Path) -> None:
    key = _string("k") + struct.pack("<IIQ", 9, element_type, length)
    assert "'k'" in _open_error(_file(tmp_path / "x.gguf", [key], [], 64))


def test_arrays_of_arrays_and_unknown_types(tmp_path: Path) -> None:
    nested = _string("k") + struct.pack("<IIQ", 9, 9, 1)
    assert "array of arrays" in _open_error(_file(tmp_path / "x.gguf", [nested], [], 64))
    unknown = _string("k") + struct.pack("<I", 77)
    assert "value type 77" in _open_error(_file(tmp_path / "y.gguf", [unknown], [], 64))


@pytest.mark.parametrize(
    "counts, told",
    [
        ((2**64 - 1, 0), str(2**64 - 1)),
        ((0, 2**64 - 1), str(2**64 - 1)),
        ((10**6, 0), "needs 24000000 bytes, 64 are left"),
        ((0, 2**16), "needs 851968 bytes, 64 are left"),
    ],
)
def test_claimed_counts(counts: tuple[int, int], told: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"\0" * 64)
    assert told in _open_error(path)


def test_magic_and_version(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\3\4 not a model")
    assert "is not a GGUF file" in _open_error(path)
    path.write_bytes(b"")
    assert "an empty or tiny file" in _open_error(path)
    assert "must be 2 or 3, got 1" in _open_error(_file(path, [], [], 0, version=1))
    assert "big-endian" in _open_error(_file(path, [], [], 0, version=3 << 24))


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    key = _string("k") + struct.pack("<IQ", 8, 2) + b"\xff\xfe"
    assert "is not UTF-8" in _open_error(_file(tmp_path / "x.gguf", [key], [], 64))


def test_tensor_types_that_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'x' is stored as IQ2_XXS, which is not read; supported: BF16"):
        GGUFFile(_file(tmp_path / "x.gguf", [], [_tensor("x", (256,), 0, tensor_type=16)], 96))
    assert "unknown type 9999" in _open_error(
        _file(tmp_path / "y.gguf", [], [_tensor("x", (256,), 0, tensor_type=9999)], 96)
    )


def test_split_models(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="one of 3 parts"):
        GGUFFile(_file(tmp_path / "x.gguf", [_u32_key("split.count", 3)], [], 0))


def test_git_lfs_pointer(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 98362432\n")
    assert "is a Git LFS pointer, not the file itself: expected 98362432 bytes, got 71" in _open_error(path)


def test_a_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    path = _file(tmp_path / "x.gguf", [], [_tensor("x", (4, 2), 0)], 32)
    opened = GGUFFile(path)
    rows = opened.rows("x")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 5)
    with pytest.raises(ModelLoadError, match="expected 32 bytes, got 27"):
        opened.read("x")
    assert rows[0:1].tolist() == [[0.0] * 4]
    with pytest.raises(ModelLoadError, match="expected 16 bytes, got 11"):
        rows[1:2]
