"""A GGUF file on its way to int8: the numbers of its floats, of which few are there at a time."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType

from jaxllm.config import CacheConfig, EngineConfig, SchedulerConfig
from jaxllm.exceptions import ModelLoadError
from jaxllm.model_loader import gguf_reader
from jaxllm.model_loader.gguf_checkpoint import GGUFCheckpoint
from jaxllm.model_loader.hf_config import model_config_from_hf
from jaxllm.model_loader.loader import load_model
from sharding.mesh import make_mesh
from tests.fakes.tiny_models import tiny_llama, write_tiny_folder, write_tiny_gguf

_FLOAT32 = jnp.dtype(jnp.float32)
_NUM_ELEMENTS = 1 << 10  # of a chunk of the test's


def _load(path, hf_config) -> dict[str, np.ndarray]:
    config = EngineConfig(
        model=model_config_from_hf(hf_config),
        model_path=path,
        quantization="int8",
        cache=CacheConfig(),
        scheduler=SchedulerConfig(max_model_len=32),
    )
    model = load_model(config, make_mesh(jax.devices()[:1]), _FLOAT32, _FLOAT32)
    state = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, key)): np.asarray(value.get_value()) for key, value in state}


def test_the_numbers_are_those_of_a_folder_of_its_floats_and_few_are_floats_at_a_time(tmp_path, monkeypatch):
    model = tiny_llama(tie_word_embeddings=False)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", model, GGMLQuantizationType.Q8_0)
    checkpoint = GGUFCheckpoint(path)
    floats = {name: checkpoint.read(name) for name in checkpoint.tensor_names()}
    folder = write_tiny_folder(tmp_path / "tiny", replace(model, tensors=floats))
    expected = _load(folder, checkpoint.config)

    sizes: list[int] = []

    def dequantized(data: np.ndarray, *arguments: Any) -> np.ndarray:
        values = original(data, *arguments)
        sizes.append(values.size)
        return values

    original = gguf_reader.dequantized
    monkeypatch.setattr(gguf_reader, "dequantized", dequantized)
    monkeypatch.setattr("jaxllm.quantization._CHUNK_ELEMENTS", _NUM_ELEMENTS)
    loaded = _load(path, checkpoint.config)
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(loaded[name], value)
        assert value.dtype == loaded[name].dtype
    # Queries and keys of two layers, whose rows are permuted, are read whole.
    assert sum(size > _NUM_ELEMENTS for size in sizes) == 4 and max(sizes) == 64 * 64


def test_tensors_that_dont_fit_are_named(tmp_path):
    model = tiny_llama()
    wide = {**model.config, "intermediate_size": 128}
    path = write_tiny_gguf(tmp_path / "tiny.gguf", model)
    with pytest.raises(ModelLoadError, match=r"down_proj.weight must make an array of shape \(64, 128\) .*\(64, 96\)"):
        _load(path, wide)
