"""Tokenizers from both kinds of checkpoint; the real model's ids against the reference."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.exceptions import InvalidRequestError, ModelLoadError
from jaxllm.model_loader.gguf_checkpoint import GGUFCheckpoint
from jaxllm.model_loader.safetensors_reader import HuggingFaceCheckpoint
from jaxllm.tokenizer.chat_template import render_chat
from jaxllm.tokenizer.loader import open_tokenizer
from jaxllm.tokenizer.tokenizer import Tokenizer
from tests.fakes.tiny_models import CHAT_TEMPLATE, micro_llama, tiny_llama, write_tiny_folder, write_tiny_gguf

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "smollm2-135m-instruct-q4_1.json").read_text())
TEXTS = [
    "",
    "the capital",
    "  two  spaces\n\n\ttab",
    "naïve café — 日本 👩‍🚀",
    "<|im_start|>user\nhi<|im_end|>",
    "1234",
]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return open_tokenizer(GGUFCheckpoint(smollm2_path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_folder(tmp_path / "tiny", tiny_llama())


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["prompt"][:20])
def test_prompts_of_the_reference(case: dict[str, Any], smollm2: Tokenizer) -> None:
    assert smollm2.encode(case["prompt"]) == case["prompt_token_ids"]
    assert smollm2.decode(case["prompt_token_ids"]) == case["prompt"]


def test_chat_of_the_reference(smollm2: Tokenizer) -> None:
    example = GOLDEN["chat_example"]
    rendered = render_chat(smollm2, example["messages"])
    assert rendered == example["rendered"]
    # <|im_start|> system \n … : each special token is one id.
    assert smollm2.encode(rendered, add_special_tokens=False)[:3] == [1, 9690, 198]


def test_the_real_vocabulary(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.special_token_ids == frozenset(range(17))
    assert (smollm2.bos_token_id, smollm2.eos_token_ids) == (
        GOLDEN["bos_token_id"],
        (GOLDEN["eos_token_id"],),
    )


@settings(max_examples=100)
@given(text=st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"]), max_size=60))
def test_any_text_comes_back(text: str, smollm2: Tokenizer) -> None:
    # The vocabulary lacks some control characters, and the byte F1 with which U+40000 begins.
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


@settings(max_examples=100)
@given(ids=st.lists(st.integers(-(2**70), 2**70) | st.integers(0, 50_000), max_size=20))
def test_decode_never_raises(ids: list[int], smollm2: Tokenizer) -> None:
    known = [token_id for token_id in ids if 0 <= token_id < 49152]
    assert smollm2.decode(ids) == smollm2.decode(known)


def test_special_tokens_are_skipped_on_demand(smollm2: Tokenizer) -> None:
    assert smollm2.decode([1, 504, 2]) == "The"
    assert smollm2.decode([1, 504, 2], skip_special_tokens=False) == "<|im_start|>The<|im_end|>"


def test_half_a_surrogate_pair(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="half of a surrogate pair stands at character 2") as caught:
        smollm2.encode("ab\ud800")
    assert caught.value.param == "prompt"


def test_both_forms_of_one_model_agree(folder: Path, tmp_path: Path) -> None:
    from_gguf = open_tokenizer(GGUFCheckpoint(write_tiny_gguf(tmp_path / "tiny.gguf", tiny_llama())))
    from_folder = open_tokenizer(HuggingFaceCheckpoint(folder))
    for text in TEXTS:
        assert from_gguf.encode(text) == from_folder.encode(text)
        assert from_gguf.decode(from_gguf.encode(text), skip_special_tokens=False) == text
    for name in ("vocab_size", "special_token_ids", "bos_token_id", "eos_token_ids", "chat_template"):
        assert getattr(from_gguf, name) == getattr(from_folder, name)
    assert (from_folder.vocab_size, from_folder.eos_token_ids) == (300, (2,))


def test_chat_template_jinja_wins(folder: Path) -> None:
    assert open_tokenizer(HuggingFaceCheckpoint(folder)).chat_template == CHAT_TEMPLATE
    (folder / "chat_template.jinja").write_text("hello")
    assert open_tokenizer(HuggingFaceCheckpoint(folder)).chat_template == "hello"


@pytest.mark.parametrize(
    "config, expected",
    [
        ({}, None),
        ({"chat_template": None}, None),
        (
            {"chat_template": [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]},
            "b",
        ),
        ({"chat_template": [7, {"name": 3}]}, None),
    ],
)
def test_other_forms_of_chat_template(config: dict[str, Any], expected: str | None, folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert open_tokenizer(HuggingFaceCheckpoint(folder)).chat_template == expected


def test_a_chat_template_that_is_no_text(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"chat_template": 7}')
    with pytest.raises(ModelLoadError, match="chat_template must be a string, got 7"):
        open_tokenizer(HuggingFaceCheckpoint(folder))


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"model": {"type": "BPE"}}', "version https://git-lfs.github.com/spec/v1\nsize 5\n"],
)
def test_a_damaged_tokenizer_json(text: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelLoadError, match="tokenizer.json: is ") as caught:
        open_tokenizer(HuggingFaceCheckpoint(folder))
    assert "\n" not in str(caught.value)


def test_no_tokenizer_json(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it weren't installed
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match="has no tokenizer.json, tokenizer.model, or vocab.json with merges.txt"):
        open_tokenizer(HuggingFaceCheckpoint(folder))


def test_prompts_are_neither_cut_nor_filled_up(folder: Path) -> None:
    path = folder / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(stored))
    assert len(open_tokenizer(HuggingFaceCheckpoint(folder)).encode("abcdefgh")) == 8


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_flipped_bytes_of_a_gguf_vocabulary(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    damaged = np.frombuffer(_micro_gguf(tmp_path_factory), np.uint8).copy()
    rng = np.random.default_rng(seed)
    damaged[rng.integers(0, 1200, 2)] = rng.integers(32, 127, 2)
    path.write_bytes(damaged.tobytes())
    try:
        tokenizer = open_tokenizer(GGUFCheckpoint(path))
        tokenizer.decode(tokenizer.encode("ab <|im_start|>"))
    except ModelLoadError as error:
        assert "\n" not in str(error)


def _micro_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.getbasetemp() / "micro.gguf"
    return path.read_bytes() if path.exists() else write_tiny_gguf(path, micro_llama()).read_bytes()
