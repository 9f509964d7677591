"""GGUF files as Hugging Face checkpoints: config, names, row order."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from jaxllm.exceptions import ModelLoadError, UnsupportedModelError
from jaxllm.model_loader.gguf_architectures import ARCHITECTURES
from jaxllm.model_loader.gguf_checkpoint import GGUFCheckpoint, huggingface_name, unpermute_rows
from jaxllm.model_loader.hf_config import model_config_from_hf
from jaxllm.model_loader.safetensors_reader import HuggingFaceCheckpoint
from tests.fakes.tiny_models import TinyModel, tiny_llama, write_tiny_folder, write_tiny_gguf


def _write(path: Path, model: TinyModel, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]) -> Path:
    """Writes a GGUF file with more metadata: key -> int, float or str."""
    add_vocabulary = gguf.GGUFWriter.add_tokenizer_model

    def add_extra(writer: gguf.GGUFWriter, name: str) -> None:
        add_vocabulary(writer, name)
        for key, value in extra.items():
            kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            kinds[type(value)](key, value)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_model", add_extra)
    return write_tiny_gguf(path, model)


def test_both_forms_of_one_model_read_equal(tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=False)
    from_gguf = GGUFCheckpoint(write_tiny_gguf(tmp_path / "tiny.gguf", model))
    from_folder = HuggingFaceCheckpoint(write_tiny_folder(tmp_path / "tiny", model))

    assert sorted(from_gguf.tensor_names()) == sorted(from_folder.tensor_names()) == sorted(model.tensors)
    for name, values in model.tensors.items():
        assert from_gguf.shape(name) == from_folder.shape(name) == values.shape
        np.testing.assert_array_equal(from_gguf.read(name), values)
        np.testing.assert_array_equal(from_folder.read(name), values)
    ours, theirs = model_config_from_hf(from_gguf.config), model_config_from_hf(from_folder.config)
    assert replace(ours, rms_norm_eps=1e-5) == theirs  # GGUF keeps eps as float32
    assert ours.rms_norm_eps == pytest.approx(1e-5)


def test_quantised_rows_come_back_in_order(tmp_path: Path) -> None:
    model = tiny_llama()
    checkpoint = GGUFCheckpoint(write_tiny_gguf(tmp_path / "tiny.gguf", model, GGMLQuantizationType.Q8_0))
    for name, values in model.tensors.items():
        np.testing.assert_allclose(checkpoint.read(name), values, atol=0.01)


def test_unpermute_rows() -> None:
    # Two heads of 4 rows, numbered by Hugging Face's order; llama.cpp stores i beside i + 2.
    stored = np.array([[0], [2], [1], [3], [4], [6], [5], [7]])
    assert unpermute_rows(stored, 2).ravel().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_huggingface_names() -> None:
    path, llama, gpt2 = Path("x.gguf"), ARCHITECTURES["llama"], ARCHITECTURES["gpt2"]
    assert huggingface_name(path, "token_embd.weight", llama) == "model.embed_tokens.weight"
    assert huggingface_name(path, "blk.12.attn_k.bias", llama) == "model.layers.12.self_attn.k_proj.bias"
    assert huggingface_name(path, "blk.0.attn_qkv.bias", gpt2) == "transformer.h.0.attn.c_attn.bias"
    for unknown in ("blk.0.attn_q", "blk.x.attn_q.weight", "blk.0.ffn_gate_exps.weight", "rope.weight"):
        with pytest.raises(UnsupportedModelError, match="is not one of LlamaForCausalLM's"):
            huggingface_name(path, unknown, llama)


def test_the_real_models_config(smollm2_path: Path) -> None:
    config = model_config_from_hf(GGUFCheckpoint(smollm2_path).config)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (49152, 576, 1536)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.head_dim, config.max_position_embeddings, config.rope_theta) == (64, 8192, 100000.0)
    assert (config.tie_word_embeddings, config.bos_token_id, config.eos_token_ids) == (True, 1, (2,))


def test_other_architectures_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedModelError,
        match="'mamba' is not supported; supported: gemma2, gemma3, gpt2, llama, phi3, qwen2, qwen3",
    ):
        GGUFCheckpoint(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count must equal the head dimension 16, got 8"),
        ({"tokenizer.ggml.eot_token_id": "x"}, "'tokenizer.ggml.eot_token_id' must be int, got str"),
    ],
)
def test_variants_and_wrong_kinds(
    extra: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        GGUFCheckpoint(_write(tmp_path / "x.gguf", tiny_llama(), monkeypatch, extra))


def test_eos_and_rope_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.eom_token_id": 2,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
    }
    config = GGUFCheckpoint(_write(tmp_path / "x.gguf", tiny_llama(), monkeypatch, extra)).config
    assert config["eos_token_id"] == [2, 0]
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def _llama3_factors(head_dim: int, factor: float) -> list[float]:
    """The converter's own loop, for theta 500000 and 8192 original positions."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * 500000.0 ** (i / head_dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _with_rope_factors(factors: list[float]) -> TinyModel:
    model = tiny_llama(rope_theta=500000.0, head_dim=64)
    return replace(model, tensors={**model.tensors, "rope_freqs.weight": np.array(factors, np.float32)})


def test_llama3_rope_scaling_is_found_in_its_factors(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_tiny_gguf(tmp_path / "x.gguf", _with_rope_factors(_llama3_factors(64, 32.0))))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in checkpoint.tensor_names()


def test_other_rope_factors(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="not those of Llama 3"):
        GGUFCheckpoint(write_tiny_gguf(tmp_path / "x.gguf", _with_rope_factors([2.0] * 32)))


def test_counts_that_contradict_each_other(tmp_path: Path) -> None:
    model = tiny_llama()
    fewer = replace(model, config={**model.config, "num_hidden_layers": 3})
    with pytest.raises(ModelLoadError, match="states 3 layers, the file has tensors for 2"):
        GGUFCheckpoint(write_tiny_gguf(tmp_path / "x.gguf", fewer))
    with pytest.raises(ModelLoadError, match="expected 299 rows in token_embd.weight, got 300"):
        GGUFCheckpoint(write_tiny_gguf(tmp_path / "y.gguf", replace(model, tokens=model.tokens[:-1])))


def test_heads_that_do_not_share_the_rows(tmp_path: Path) -> None:
    model = tiny_llama()
    checkpoint = GGUFCheckpoint(write_tiny_gguf(tmp_path / "x.gguf", model))
    checkpoint.config["num_attention_heads"] = 5
    with pytest.raises(ModelLoadError, match="64 rows, which 5 heads can't share evenly"):
        checkpoint.read("model.layers.0.self_attn.q_proj.weight")
