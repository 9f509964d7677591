"""How many blocks the KV cache gets, by which of the ways to say it."""

import dataclasses
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from jaxllm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from jaxllm.exceptions import ConfigError
from jaxllm.model_loader.hf_config import model_config_from_hf
from jaxllm.worker import worker as worker_module
from jaxllm.worker.cache_engine import CacheEngine, count_blocks, needs_profile
from jaxllm.worker.memory_profile import MemoryProfile
from jaxllm.worker.programs import Program
from sharding.mesh import make_mesh
from tests.fakes.tiny_models import tiny_llama, write_tiny_folder

_FLOAT32 = jnp.dtype(jnp.float32)
_BLOCK_BYTES = 2 * 2 * 4 * 1 * 4 * 4  # keys and values, layers, tokens, KV heads, head dim, float32
_MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=32,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    max_position_embeddings=64,
)


def _count(cache: CacheConfig, profile: MemoryProfile | None = None, max_num_seqs: int = 256) -> int:
    return count_blocks(_config(cache, max_num_seqs), _mesh(), _FLOAT32, "cpu", 2, profile).device


def _config(cache: CacheConfig, max_num_seqs: int) -> EngineConfig:
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, max_model_len=40)
    return EngineConfig(
        model=_MODEL, model_path=Path("m"), cache=dataclasses.replace(cache, block_size=4), scheduler=scheduler
    )


def _mesh() -> Mesh:
    return make_mesh(jax.local_devices()[:1])


def _profile(num_blocks: int) -> MemoryProfile:
    return MemoryProfile(
        total_bytes=2 * (num_blocks * _BLOCK_BYTES + 500), utilization=0.5, weight_bytes=300, activation_bytes=200
    )


def test_the_override_goes_before_everything() -> None:
    cache = CacheConfig(num_gpu_blocks_override=5, kv_cache_memory_bytes=100 * _BLOCK_BYTES)
    assert _count(cache, _profile(50)) == 5
    engine = CacheEngine(_config(cache, 256), _mesh(), _FLOAT32, "cpu", num_layers=2, num_blocks=5)
    assert (engine.num_blocks, engine.block_size) == (5, 4)
    assert [array.shape for layer in engine.caches for array in layer] == [(5, 1, 4, 4)] * 4


def test_a_size_in_bytes_is_rounded_down_to_blocks() -> None:
    assert _count(CacheConfig(kv_cache_memory_bytes=10 * _BLOCK_BYTES - 1)) == 9
    with pytest.raises(ConfigError, match="at least 2 blocks of 256 bytes, got 511 bytes"):
        _count(CacheConfig(kv_cache_memory_bytes=2 * _BLOCK_BYTES - 1))


def test_no_more_blocks_than_full_sequences_could_use() -> None:
    assert _count(CacheConfig(), max_num_seqs=3) == 3 * 10 + 1  # of the 1 GiB that is a CPU's default


def test_the_profile_decides_and_is_logged_with_every_term(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("jaxllm.worker.cache_engine")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger.name)
    try:
        assert _count(CacheConfig(), _profile(50)) == 50
    finally:
        logger.removeHandler(caplog.handler)
    text = caplog.text
    assert "of device memory x gpu_memory_utilization 0.5 - weights" in text and "- activations" in text
    assert "12800 bytes for KV / 256 bytes a block = 50 device blocks" in text


def test_a_profile_too_small_for_one_full_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len=40 tokens.*set --max-model-len 36 or less"):
        _count(CacheConfig(), _profile(10))


@pytest.mark.parametrize(
    ("platform", "cache", "expected"),
    [
        ("cpu", CacheConfig(), False),
        ("gpu", CacheConfig(), True),
        ("tpu", CacheConfig(), True),
        ("tpu", CacheConfig(kv_cache_memory_bytes=1 << 30), False),
        ("gpu", CacheConfig(num_gpu_blocks_override=9), False),
    ],
)
def test_what_is_named_is_not_measured(platform: str, cache: CacheConfig, expected: bool) -> None:
    assert needs_profile(cache, platform) is expected


def test_a_worker_fills_the_memory_that_its_device_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, int]] = []

    def measure(programs: list[Program]) -> int:
        measured.extend((program.name, program.size) for program in programs)
        return 786_432

    monkeypatch.setattr(worker_module, "needs_profile", lambda cache, platform: True)
    monkeypatch.setattr(worker_module, "_device_memory", lambda mesh: (4_194_304, 1_048_576))
    monkeypatch.setattr(worker_module, "measure_activations", measure)
    model = tiny_llama()
    config = EngineConfig(
        model=model_config_from_hf(model.config),
        model_path=write_tiny_folder(tmp_path, model),
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=3, max_model_len=1000),
    )
    # 0.9 x 4,194,304 - 1,048,576 - 786,432 = 1,939,865 bytes, in blocks of 2 x 2 x 4 x 2 x 16 x 4 = 2,048.
    assert worker_module.Worker(config).initialize().num_device_blocks == 947
    assert measured == [
        *[("embed", 4), ("layers_0", 4), ("logits", 4), ("sample", 4), ("score", 4), ("edit_logits", 4)],
        *[("copy_blocks", 16), ("gather_blocks", 16), ("scatter_blocks", 16)],
    ]


def test_block_tables_that_a_tpu_cannot_hold_are_refused_before_the_weights_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAXLLM_ATTENTION", "tpu")
    config = EngineConfig(
        model=_MODEL,
        model_path=Path("no-such-model"),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=64, max_model_len=131_072),
    )
    with pytest.raises(ConfigError, match="set --block-size to at least 64 or --max-num-seqs to at most 16 or"):
        worker_module.Worker(config).initialize()
