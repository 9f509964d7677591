"""Arrays read region by region equal what Orbax wrote, and anything else than what it writes is refused."""

import itertools
import json
import os
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.exceptions import ModelLoadError
from jaxllm.model_loader.orbax_writer import save_weights
from jaxllm.model_loader.zarr_array import DESCRIPTION_NAME, ZarrArray

DESCRIPTION = {
    "chunks": [2, 3],
    "compressor": None,
    "dimension_separator": ".",
    "dtype": "<f4",
    "fill_value": None,
    "filters": None,
    "order": "C",
    "shape": [4, 6],
    "zarr_format": 2,
}
FLOAT32 = np.dtype(np.float32)


def _write(folder: Path, values: np.ndarray, chunks: tuple[int, ...]) -> Path:
    """Writes an array as the format's specification has it: whole chunks, the last ones filled up."""
    folder.mkdir()
    description = {**DESCRIPTION, "shape": list(values.shape), "chunks": list(chunks), "dtype": values.dtype.str}
    (folder / DESCRIPTION_NAME).write_text(json.dumps(description))
    grid = [range(-(-size // chunk)) for size, chunk in zip(values.shape, chunks, strict=True)]
    for index in itertools.product(*grid):
        block = np.full(chunks, 99, values.dtype)
        part = values[tuple(slice(i * chunk, (i + 1) * chunk) for i, chunk in zip(index, chunks, strict=True))]
        block[tuple(slice(0, size) for size in part.shape)] = part
        (folder / (".".join(map(str, index)) or "0")).write_bytes(block.tobytes())
    return folder


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4)])
def test_what_orbax_wrote(dtype, shape, tmp_path: Path) -> None:
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    save_weights(tmp_path / "w", {"a.b": jax.device_put(values)})
    array = ZarrArray(tmp_path / "w" / "a.b", shape, values.dtype)
    read = array.read([slice(0, size) for size in shape])
    assert read.dtype == values.dtype
    np.testing.assert_array_equal(read, values)


def test_orbax_reads_it_too(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.int8).reshape(3, 4)
    save_weights(tmp_path / "w", {"a.b": jax.device_put(values)})
    restored = ocp.PyTreeCheckpointer().restore(tmp_path / "w", restore_args={"a.b": ocp.RestoreArgs(np.ndarray)})
    np.testing.assert_array_equal(restored["a.b"], values)


@given(data=st.data())
def test_any_region_of_any_chunks(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), max_size=3).map(tuple))
    chunks = tuple(data.draw(st.integers(1, size)) for size in shape)
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    array = ZarrArray(_write(tmp_path_factory.mktemp("a") / "b", values, chunks), shape, FLOAT32)
    region = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        region.append(slice(start, data.draw(st.integers(start + 1, size))))
    np.testing.assert_array_equal(array.read(region), values[tuple(region)])


def test_memory_that_the_cpu_uses_in_place(tmp_path: Path) -> None:
    array = ZarrArray(_write(tmp_path / "a", np.zeros((4, 6), np.float32), (2, 3)), (4, 6), FLOAT32)
    for region in ([slice(0, 2), slice(0, 3)], [slice(1, 3), slice(0, 6)]):
        assert array.read(region).ctypes.data % 64 == 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": "<f8"}, "expected dtype '<f4', got '<f8'"),
        ({"shape": [4, 7]}, r"expected shape \[4, 6\], got \[4, 7\]"),
        ({"compressor": {"id": "zstd"}}, "expected compressor None"),
        ({"filters": [{"id": "delta"}]}, "expected filters None"),
        ({"fill_value": 0}, "expected fill_value None, got 0"),
        ({"order": "F"}, "expected order 'C', got 'F'"),
        ({"zarr_format": 3}, "expected zarr_format 2, got 3"),
        ({"more": None}, "expected more None, got None"),
        ({"chunks": [0, 3]}, r"must fit into the shape \[4, 6\], got \[0, 3\]"),
        ({"chunks": [5, 3]}, "must fit into the shape"),
        ({"chunks": [2]}, "must fit into the shape"),
        ({"chunks": [True, 3]}, "must fit into the shape"),
        ({"chunks": None}, "must fit into the shape"),
        ({"chunks": [2, 2]}, r"0.0: expected 16 bytes, got 24"),
    ],
)
def test_other_descriptions(change, message, tmp_path: Path) -> None:
    folder = _write(tmp_path / "a", np.zeros((4, 6), np.float32), (2, 3))
    (folder / DESCRIPTION_NAME).write_text(json.dumps({**DESCRIPTION, **change}))
    with pytest.raises(ModelLoadError, match=message):
        ZarrArray(folder, (4, 6), FLOAT32)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"[" * 5000])
def test_no_description(text: bytes, tmp_path: Path) -> None:
    folder = _write(tmp_path / "a", np.zeros((4, 6), np.float32), (2, 3))
    (folder / DESCRIPTION_NAME).write_bytes(text)
    with pytest.raises(ModelLoadError, match="convert the model again"):
        ZarrArray(folder, (4, 6), FLOAT32)


def test_files_that_are_missing_short_long_or_links(tmp_path: Path) -> None:
    folder = _write(tmp_path / "a", np.zeros((4, 6), np.float32), (2, 3))
    shard = folder / "1.0"
    data = shard.read_bytes()
    for damaged in (data[:-1], data + b"x"):
        shard.write_bytes(damaged)
        with pytest.raises(ModelLoadError, match=f"1.0: expected 24 bytes, got {len(damaged)}"):
            ZarrArray(folder, (4, 6), FLOAT32)
    shard.unlink()
    with pytest.raises(ModelLoadError, match="1.0: can't be read: No such file"):
        ZarrArray(folder, (4, 6), FLOAT32)
    (tmp_path / "elsewhere").write_bytes(data)
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelLoadError, match="links are not followed"):
        ZarrArray(folder, (4, 6), FLOAT32)
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(ModelLoadError, match="must be an ordinary file"):
        ZarrArray(folder, (4, 6), FLOAT32)


def test_files_that_change_after_they_were_checked(tmp_path: Path) -> None:
    folder = _write(tmp_path / "a", np.zeros((4, 6), np.float32), (2, 3))
    array = ZarrArray(folder, (4, 6), FLOAT32)
    (folder / "0.1").write_bytes(b"short")
    with pytest.raises(ModelLoadError, match="0.1: expected 24 bytes, got 5"):
        array.read([slice(0, 4), slice(0, 6)])
    (folder / "0.1").unlink()
    (folder / "0.1").symlink_to(folder / "0.0")
    with pytest.raises(ModelLoadError, match="0.1: can't be read"):
        array.read([slice(0, 4), slice(0, 6)])


def test_more_shards_than_anybody_has(tmp_path: Path) -> None:
    folder = _write(tmp_path / "a", np.zeros((4, 6), np.float32), (2, 3))
    shape = (1 << 20, 6)
    (folder / DESCRIPTION_NAME).write_text(json.dumps({**DESCRIPTION, "shape": shape, "chunks": [1, 1]}))
    with pytest.raises(ModelLoadError, match="may have at most 65536 shards, got 6291456"):
        ZarrArray(folder, shape, FLOAT32)
