"""Scales of a KV cache of int8: those of keys and values that numpy computes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import CacheConfig, EngineConfig, SchedulerConfig
from jaxllm.model_loader.checkpoint import open_checkpoint
from jaxllm.model_loader.hf_config import model_config_from_hf
from jaxllm.model_loader.loader import load_model
from jaxllm.tokenizer.loader import open_tokenizer
from jaxllm.worker.calibration_text import CALIBRATION_TEXT
from jaxllm.worker.kv_calibration import calibrate_cache
from sharding.mesh import make_mesh
from tests.fakes.dense_llama import dense_logits
from tests.fakes.tiny_models import tiny_llama, write_tiny_folder

_MAX_LEN = 61  # the last block isn't full
_FLOAT32 = jnp.dtype(jnp.float32)


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    monkeypatch.setenv("JAXLLM_ATTENTION", "reference")


def _scales(path, hf_config, load_format="auto"):
    """Returns each layer's scales, as an engine would have them."""
    config = EngineConfig(
        model=model_config_from_hf(hf_config),
        model_path=path,
        load_format=load_format,
        cache=CacheConfig(block_size=4, cache_dtype="int8"),
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=_MAX_LEN, max_model_len=_MAX_LEN),
    )
    mesh = make_mesh(jax.devices()[:1])
    model = load_model(config, mesh, _FLOAT32, _FLOAT32)
    assert all(np.all(layer.attention.cache_scales[...] == 1) for layer in model.layers)
    calibrate_cache(config, mesh, [model], _FLOAT32, "cpu")
    return [np.asarray(layer.attention.cache_scales[...]) for layer in model.layers]


def test_the_largest_of_the_text_has_a_quarter_of_room_and_pairs_share_their_length(tmp_path):
    model = tiny_llama(num_attention_heads=6, num_key_value_heads=3)
    path = write_tiny_folder(tmp_path, model)
    token_ids = open_tokenizer(open_checkpoint(str(path))).encode(CALIBRATION_TEXT)[:_MAX_LEN]
    assert len(token_ids) == _MAX_LEN
    cached = []
    dense_logits(model, token_ids, cached)
    scales = _scales(path, model.config)
    assert [each.shape for each in scales] == [(2, 3, 16)] * 2
    for (keys, values), (k_scales, v_scales) in zip(cached, scales, strict=True):
        lengths = np.hypot(keys[..., :8], keys[..., 8:]).max(axis=0)  # whatever the positions are
        np.testing.assert_allclose(k_scales, np.tile(lengths, 2) * 1.25 / 127, rtol=1e-5)
        np.testing.assert_allclose(v_scales, np.abs(values).max(axis=0) * 1.25 / 127, rtol=1e-5)


def test_made_up_weights_need_neither_a_text_nor_a_tokenizer(tmp_path):
    model = tiny_llama(num_hidden_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    (scales,) = _scales(tmp_path, model.config, load_format="dummy")
    assert np.all(np.isfinite(scales)) and np.all(scales > 0)
