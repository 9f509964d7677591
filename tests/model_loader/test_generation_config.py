"""Which generation config holds, and what it sets."""

from pathlib import Path

import pytest

from jaxllm.engine.front_end import load_front_end
from jaxllm.engine_args import EngineArgs
from jaxllm.exceptions import ConfigError, ModelLoadError
from jaxllm.model_loader.generation_config import choose_generation_config, sampling_defaults
from tests.fakes.tiny_models import tiny_llama, write_tiny_folder

OWN = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 0], "do_sample": True, "repetition_penalty": 1.1}


def test_sampling_defaults_have_our_names() -> None:
    assert sampling_defaults(OWN) == {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    assert sampling_defaults({"max_new_tokens": 5, "top_k": 0, "min_p": None}) == {"max_tokens": 5, "top_k": 0}
    assert sampling_defaults({}) == {}


@pytest.mark.parametrize("setting, expected", [("auto", OWN), ("vllm", {}), ("jaxllm", {})])
def test_words(setting: str, expected: dict[str, object]) -> None:
    assert choose_generation_config(setting, OWN, Path("m")) == expected


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.1}')
    assert choose_generation_config(str(tmp_path), OWN, Path("m")) == {"temperature": 0.1}
    with pytest.raises(
        ConfigError, match="must be auto, vllm, jaxllm or a folder with a generation_config.json, got '"
    ):
        choose_generation_config(str(tmp_path / "none"), OWN, Path("m"))


@pytest.mark.parametrize("value", ["hot", True, [1], 1e999])
def test_what_is_no_number(value: object) -> None:
    with pytest.raises(ModelLoadError, match="m/generation_config.json: temperature must be a number, got"):
        choose_generation_config("auto", {"temperature": value}, Path("m"))


def test_the_front_end_takes_them_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_tiny_folder(tmp_path / "m", tiny_llama())
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 0, "repetition_penalty": 1.1}')
    own = tmp_path / "own"
    own.mkdir()
    (own / "generation_config.json").write_text('{"top_k": 7, "eos_token_id": 5}')
    caplog.set_level("WARNING", "jaxllm")
    config, _, eos_token_ids = load_front_end(EngineArgs(model=str(folder)))
    assert sampling_defaults(config.generation_config) == {"temperature": 0.6, "repetition_penalty": 1.1}
    assert eos_token_ids == [0]
    lines = [record.getMessage() for record in caplog.records]
    assert [line[:60] for line in lines] == ["sampling parameters that requests leave out are the model's "]
    assert "temperature=0.6, repetition_penalty=1.1" in lines[0]
    config, _, eos_token_ids = load_front_end(EngineArgs(model=str(folder), generation_config="vllm"))
    assert (config.generation_config, eos_token_ids) == ({}, [0])
    config, _, eos_token_ids = load_front_end(EngineArgs(model=str(folder), generation_config=str(own)))
    assert (sampling_defaults(config.generation_config), eos_token_ids) == ({"top_k": 7}, [0, 5])
