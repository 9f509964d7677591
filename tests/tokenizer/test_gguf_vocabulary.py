"""Vocabularies in GGUF metadata: all kinds, BOS and EOS, and what contradicts itself."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers

from jaxllm.exceptions import ModelLoadError, UnsupportedModelError
from jaxllm.model_loader.gguf_reader import GGUFFile
from jaxllm.tokenizer.gguf_vocabulary import open_gguf_tokenizer
from jaxllm.tokenizer.tokenizer import Tokenizer

BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
WORDS = ["<s>", "</s>", *BYTES, "12", "123", "ab", "\u0120ab"]
MERGES = ["1 2", "12 3", "a b", "\u0120 ab"]


def _build(path: Path, kind: str = "gpt2", tokens: list[str] = WORDS, **values: Any) -> Tokenizer:
    """Builds a tokenizer from metadata; values are tokenizer.ggml keys, and None leaves a default out."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    if kind == "gpt2":
        values = {"merges": MERGES, "token_type": [3, 3] + [1] * (len(tokens) - 2), "pre": "gpt-2", **values}
    for name, value in values.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf_tokenizer(GGUFFile(path), None, ())


def _pieces(tokenizer: Tokenizer, text: str, tokens: list[str] = WORDS, **kwargs: bool) -> list[str]:
    return [tokens[token_id].replace("\u0120", "_") for token_id in tokenizer.encode(text, **kwargs)]


@pytest.mark.parametrize(
    "pre, expected",
    [
        ("gpt-2", ["ab", "_ab", "_", "123", "4", "!"]),
        ("smollm", ["ab", "_ab", "_", "1", "2", "3", "4", "!"]),
        ("qwen2", ["ab", "_ab", "_", "1", "2", "3", "4", "!"]),
        ("llama-bpe", ["ab", "_ab", "_", "123", "4", "!"]),
        ("default", ["ab", "_ab", "_", "123", "4", "!"]),
    ],
)
def test_each_pre_splits_numbers_its_own_way(pre: str, expected: list[str], tmp_path: Path) -> None:
    tokenizer = _build(tmp_path / "x.gguf", pre=pre, add_bos_token=False)
    assert _pieces(tokenizer, "ab ab 1234!") == expected
    assert tokenizer.decode(tokenizer.encode("ab ab 1234!\r\n  né")) == "ab ab 1234!\r\n  né"


def test_llama_bpe_takes_whole_words_without_merges(tmp_path: Path) -> None:
    tokens = [*WORDS, "xyz"]  # no merge leads to it
    assert _pieces(_build(tmp_path / "a.gguf", tokens=tokens), "xyz", tokens) == ["x", "y", "z"]
    tokenizer = _build(tmp_path / "b.gguf", tokens=tokens, pre="llama-bpe", add_bos_token=False)
    assert _pieces(tokenizer, "xyz", tokens) == ["xyz"]


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    tokenizer = _build(tmp_path / "x.gguf", pre="qwen2")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize(
    "flags, expected",
    [
        ({}, ["ab"]),
        ({"add_bos_token": True}, ["<s>", "ab"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "ab", "</s>"]),
        ({"add_eos_token": True}, ["ab", "</s>"]),
        ({"pre": "llama-bpe"}, ["<s>", "ab"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["ab"]),
    ],
)
def test_bos_and_eos(flags: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    tokenizer = _build(tmp_path / "x.gguf", bos_token_id=0, eos_token_id=1, **flags)
    assert _pieces(tokenizer, "ab") == expected
    assert _pieces(tokenizer, "ab", add_special_tokens=False) == ["ab"]


def test_control_tokens_are_special_and_user_defined_ones_are_text(tmp_path: Path) -> None:
    types = [3, 4] + [1] * (len(WORDS) - 2)
    tokenizer = _build(tmp_path / "x.gguf", token_type=types)
    ids = tokenizer.encode("<s>ab</s>")
    assert ids == [0, WORDS.index("ab"), 1]
    assert tokenizer.decode(ids) == "ab</s>"


SP_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SP_TOKENS = ["<unk>", "<s>", "</s>", *SP_BYTES, "\u2581", "a", "b", "ab", "\u2581ab", "c", "bc", "\u2581a"]
SP_SCORES = [0.0] * 259 + [-6.0, -7.0, -8.0, -1.0, -2.0, -9.0, -3.0, -4.0]
SP_TYPES = [2, 3, 3] + [6] * 256 + [1] * 8


def _build_sentencepiece(path: Path, kind: str = "llama", **values: Any) -> Tokenizer:
    values = {"scores": SP_SCORES, "token_type": SP_TYPES, "bos_token_id": 1, **values}
    return _build(path, kind, SP_TOKENS, **values)


def _sp_pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return _pieces(tokenizer, text, SP_TOKENS)


def test_sentencepiece_joins_the_best_score_first(tmp_path: Path) -> None:
    tokenizer = _build_sentencepiece(tmp_path / "x.gguf")
    # "ab" (-1) is joined before "bc" (-3) and "_a" (-4) can be.
    assert _sp_pieces(tokenizer, "abc ab") == ["<s>", "\u2581ab", "c", "\u2581ab"]
    assert _sp_pieces(tokenizer, "bc") == ["<s>", "\u2581", "bc"]
    assert _sp_pieces(tokenizer, "\u00e9") == ["<s>", "\u2581", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("abc  ab\u00e9")) == "abc  ab\u00e9"


def test_unigram_takes_the_likeliest_pieces_of_all(tmp_path: Path) -> None:
    values = {"add_space_prefix": True, "eos_token_id": 2}
    tokenizer = _build_sentencepiece(tmp_path / "x.gguf", "t5", **values)
    # _a and bc are worth -4 - 3, _ab and c -2 - 9.
    assert _sp_pieces(tokenizer, "abc") == ["\u2581a", "bc", "</s>"]
    assert tokenizer.decode(tokenizer.encode("abc ab")) == "abc ab"


def test_unigram_drops_spaces_where_the_file_says_so(tmp_path: Path) -> None:
    values = {"add_space_prefix": True, "remove_extra_whitespaces": True, "add_eos_token": False}
    tokenizer = _build_sentencepiece(tmp_path / "x.gguf", "t5", **values)
    assert _sp_pieces(tokenizer, "  ab   ab ") == ["\u2581ab", "\u2581ab"]


def test_sentencepiece_without_a_space_before(tmp_path: Path) -> None:
    tokenizer = _build_sentencepiece(tmp_path / "x.gguf", add_space_prefix=False, add_bos_token=False)
    assert _sp_pieces(tokenizer, "ab ab") == ["ab", "\u2581ab"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def test_control_pieces_are_found_in_texts_and_user_defined_spaces_joined(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "\u2581", "a", "  ", "<mid>"]
    types, scores = [3, 3, 1, 1, 4, 3], [0.0, 0.0, -1.0, -2.0, 0.0, 0.0]
    values = {"unknown_token_id": 0, "bos_token_id": 1, "add_space_prefix": False}
    tokenizer = _build(tmp_path / "x.gguf", "llama", tokens, scores=scores, token_type=types, **values)
    assert _pieces(tokenizer, "a  <mid>   a<s>", tokens) == ["<s>", "a", "  ", "<mid>", "  ", "\u2581", "a", "<s>"]
    assert tokenizer.decode([1, 3, 5, 4, 3, 0]) == "a  a"
    assert tokenizer.decode([1, 3, 5], skip_special_tokens=False) == "<s>a<mid>"
    assert tokenizer.special_token_ids == {0, 1, 5}


@pytest.mark.parametrize("scores", [[], [1.0] * 5, [float("nan")] * len(SP_TOKENS)])
def test_scores_that_are_none(scores: list[float], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="scores"):
        _build_sentencepiece(tmp_path / "x.gguf", scores=scores)


def test_kinds_that_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match="tokenizer.ggml.model 'bert' is not supported; supported: gpt2, llama, t5"
    ):
        _build(tmp_path / "x.gguf", kind="bert")
    with pytest.raises(UnsupportedModelError, match="tokenizer.ggml.pre 'martian' is not supported; supported: deep"):
        _build(tmp_path / "y.gguf", pre="martian")


@pytest.mark.parametrize(
    "values, message",
    [
        ({"tokens": [*WORDS, "ab"]}, "1 tokens twice"),
        ({"merges": ["ab"]}, "a merge must be two tokens with a space between, got 'ab'"),
        ({"merges": ["a zzz"]}, "the vocabulary can't be used: .*zzz"),
        ({"merges": "a b"}, "'tokenizer.ggml.merges' must be list, got str"),
        ({"merges": [1, 2]}, "'tokenizer.ggml.merges' must be list, got ndarray"),
        ({"token_type": [1, 2, 3]}, "token types of 1 to 6, got 3"),
        ({"add_bos_token": True}, "'tokenizer.ggml.bos_token_id' is missing"),
        ({"add_bos_token": True, "bos_token_id": 10**6}, "bos_token_id must be in "),
    ],
)
def test_contradictions(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        _build(tmp_path / "x.gguf", **values)
    assert "\n" not in str(caught.value)
