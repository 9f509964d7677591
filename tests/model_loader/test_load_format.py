"""--load-format: what a model is said to be, and models made up of their config.json alone."""

from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.front_end import load_front_end
from jaxllm.engine_args import EngineArgs
from jaxllm.exceptions import ConfigError, ModelLoadError
from jaxllm.model_loader.checkpoint import open_checkpoint
from jaxllm.model_loader.converter import convert
from jaxllm.tokenizer.dummy_tokenizer import DummyTokenizer
from tests.fakes.golden_families import read_case, write_folder
from tests.fakes.loaded_weights import load_weights
from tests.fakes.tiny_models import tiny_llama, write_tiny_folder, write_tiny_gguf


def test_a_model_is_of_one_format(tmp_path: Path) -> None:
    paths = {
        "safetensors": write_tiny_folder(tmp_path / "folder", tiny_llama()),
        "gguf": write_tiny_gguf(tmp_path / "m.gguf", tiny_llama()),
        "orbax": tmp_path / "converted",
    }
    convert(str(paths["gguf"]), paths["orbax"])
    for found, path in paths.items():
        for said in paths:
            if said == found:
                assert open_checkpoint(str(path), said).path == path
                continue
            with pytest.raises(ModelLoadError, match=f"is of format {found}, not {said}; set --load-format auto"):
                open_checkpoint(str(path), said)
    with pytest.raises(ConfigError, match="load_format must be one of auto, safetensors, gguf, orbax, dummy, got 'pt'"):
        EngineArgs(load_format="pt").create_engine_config(open_checkpoint(str(paths["gguf"])))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_dummy_weights_are_small_and_the_same_each_time(quantization: str | None, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "m", read_case("mixtral", "top_2"))
    real = load_weights(source, quantization=quantization)
    (source / "model.safetensors").unlink()
    dummy = load_weights(source, load_format="dummy", quantization=quantization)
    assert {name: (a.shape, a.dtype) for name, a in dummy.items()} == {n: (a.shape, a.dtype) for n, a in real.items()}
    norm = dummy["layers.0.mlp_norm.weight"]
    assert 0 < np.abs(norm).max() < 1e-3 and len(np.unique(norm)) == norm.size
    again = load_weights(source, load_format="dummy", quantization=quantization)
    assert all(np.array_equal(values, again[name]) for name, values in dummy.items())


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_dummy_model_answers(has_tokenizer: bool, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m", tiny_llama())
    (folder / "model.safetensors").unlink()
    if not has_tokenizer:
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").unlink()
    args: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 32}
    with LLM(str(folder), "inproc", load_format="dummy", kv_cache_memory_bytes=1 << 24, **args) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        (output,) = llm.generate(["the capital"], params, use_tqdm=False)
        assert isinstance(llm.get_tokenizer(), DummyTokenizer) is not has_tokenizer
    assert len(output.outputs[0].token_ids) == 3


def test_real_weights_want_a_real_tokenizer(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m", tiny_llama())
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_front_end(EngineArgs(model=str(folder)))


def test_the_dummy_tokenizer() -> None:
    tokenizer = DummyTokenizer(100)
    assert tokenizer.encode("aé") == [97, 95, 69]
    assert tokenizer.decode([0, 25, 26, 99, 100, -1]) == "azav"
    assert tokenizer.encode("\ud800") == [63]


def test_a_file_or_a_converted_model_may_be_dummied_too(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "m.gguf", tiny_llama())
    convert(str(source), tmp_path / "converted")
    for path in (source, tmp_path / "converted"):
        config, tokenizer, _ = load_front_end(EngineArgs(model=str(path), load_format="dummy"))
        assert (config.load_format, tokenizer.vocab_size) == ("dummy", 300)


def test_the_hub_is_not_asked_for_weights_that_are_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_folder(tmp_path / "snapshot", tiny_llama())
    asked: dict[str, Any] = {}

    def download(repo_id: str, **kwargs: Any) -> str:
        asked.update(kwargs)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    load_front_end(EngineArgs(model="org/name", load_format="dummy"))
    assert "*.json" in asked["allow_patterns"] and "*.safetensors" not in asked["allow_patterns"]
