"""Hugging Face folders, whole and damaged."""

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.exceptions import ModelLoadError, UnsupportedModelError
from jaxllm.model_loader.safetensors_reader import HuggingFaceCheckpoint, read_header
from tests.fakes.tiny_models import micro_llama, tiny_llama, write_tiny_folder

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _error(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        HuggingFaceCheckpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _raw(path: Path, header: dict[str, Any] | bytes, num_data_bytes: int) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * num_data_bytes)
    return path


def _entry(start: int, end: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_tensors_come_back_in_their_stored_dtype(dtype: type, num_shards: int, tmp_path: Path) -> None:
    model = tiny_llama()
    checkpoint = HuggingFaceCheckpoint(write_tiny_folder(tmp_path / "m", model, num_shards, dtype))
    assert sorted(checkpoint.tensor_names()) == sorted(model.tensors)
    for name, values in model.tensors.items():
        assert checkpoint.read(name).dtype == dtype
        np.testing.assert_array_equal(checkpoint.read(name), values.astype(dtype))


def test_generation_config_brings_the_eos_ids(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m", tiny_llama())
    assert HuggingFaceCheckpoint(folder).config["eos_token_id"] == 2
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0], "temperature": 0.6}')
    checkpoint = HuggingFaceCheckpoint(folder)
    assert checkpoint.config["eos_token_id"] == [2, 0]
    assert checkpoint.generation_config["temperature"] == 0.6


def test_truncation_at_every_length(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m", micro_llama())
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in reversed(range(len(whole))):
        os.truncate(path, length)
        with pytest.raises(ModelLoadError):
            read_header(path)
    path.write_bytes(whole[:-7])
    assert f"expected {len(whole)} bytes by its header, got {len(whole) - 7}" in _error(folder)


@pytest.fixture(scope="module")
def micro_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("micro") / "m", micro_llama())


@settings(max_examples=200)
@given(flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3))
def test_flipped_bytes_open_or_raise_model_load_error(micro_folder: Path, flips: list[tuple[int, int]]) -> None:
    path = micro_folder / "damaged"
    damaged = bytearray((micro_folder / "model.safetensors").read_bytes())
    header_bytes = 8 + struct.unpack("<Q", damaged[:8])[0]
    for position, value in flips:
        damaged[position % header_bytes] = value
    path.write_bytes(damaged)
    try:
        read_header(path)
    except ModelLoadError as error:
        assert "\n" not in str(error)


def test_missing_and_swapped_shards(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m", tiny_llama(), num_shards=2)
    shutil.move(folder / FIRST, folder / "aside")
    shutil.move(folder / SECOND, folder / FIRST)
    assert f"'{SECOND}' is missing (1 found)" in _error(folder)
    shutil.move(folder / "aside", folder / SECOND)
    assert "expected tensor 'model.embed_tokens.weight' by model.safetensors.index.json" in _error(folder)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a\0b.safetensors", "weights.bin", 7, None, ""])
def test_index_that_names_other_files(name: Any, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m", tiny_llama(), num_shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    assert "must name *.safetensors files beside it" in _error(folder)


def test_git_lfs_pointer_in_place_of_a_shard(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m", tiny_llama(), num_shards=2)
    (folder / SECOND).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5000\n")
    assert f"{SECOND}: is a Git LFS pointer, not the file itself: expected 5000 bytes, got 67" in _error(folder)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m", micro_llama())
    shutil.move(folder / "model.safetensors", folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    assert "b.safetensors: tensor" in _error(folder)


def test_a_folder_with_pickles_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "no *.safetensors file; pytorch_model.bin is a pickle" in _error(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"a": NaN}', '{"a": Infinity}', "\ufeff{}", "\0"])
def test_damaged_config_json(text: str, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m", micro_llama())
    (folder / "config.json").write_text(text)
    assert "config.json: " in _error(folder)


@pytest.mark.parametrize(
    "header",
    [
        {"a": _entry(0, 8), "b": _entry(4, 12)},  # overlap
        {"a": _entry(0, 8), "b": _entry(12, 20)},  # gap
        {"a": _entry(8, 0)},
        {"a": _entry(0, 8, [2**62, 4])},
        {"a": _entry(0, 8, [-2])},
        {"a": _entry(0, 8, [2.0])},
        {"a": _entry(0, 8, [True, 2])},
        {"a": _entry(0, 8, [1] * 9)},
        {"a": {"dtype": "F32"}},
        {"a": 3},
        b"[1, 2]",
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}',
        b"\xff\xff",
    ],
)
def test_damaged_headers(header: dict[str, Any] | bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        read_header(_raw(tmp_path / "x.safetensors", header, 20))


def test_a_good_header(tmp_path: Path) -> None:
    tensors = read_header(_raw(tmp_path / "x", {"__metadata__": {"format": "pt"}, "a": _entry(0, 8)}, 8))
    assert {name: (tensor.shape, tensor.num_bytes) for name, tensor in tensors.items()} == {"a": ((2,), 8)}


def test_a_header_longer_than_the_file(tmp_path: Path) -> None:
    for length in (2**63, 10**8 + 1, 100):
        (tmp_path / "x").write_bytes(struct.pack("<Q", length) + b"{}")
        with pytest.raises(ModelLoadError, match=f"expected a header of {length} bytes, got a file of 10"):
            read_header(tmp_path / "x")


def test_dtypes_that_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="stored as 'F8_E4M3', which is not read; supported: F64, F32"):
        read_header(_raw(tmp_path / "x", {"a": _entry(0, 2, dtype="F8_E4M3")}, 2))
