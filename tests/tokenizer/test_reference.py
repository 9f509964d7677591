"""Ids and texts of ten thousand strings equal the reference tokenizers', by the hashes of scripts/make_golden."""

import json
from pathlib import Path

import pytest

from jaxllm.model_loader import demo_models
from jaxllm.model_loader.gguf_checkpoint import GGUFCheckpoint
from jaxllm.tokenizer.loader import open_tokenizer
from tests.fakes.unicode_strings import GROUP_SIZE, group_hashes, unicode_strings

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tokenizers.json").read_text())
# Real reports: characters of several tokens, characters that were broken, an emoji of several characters, no text.
BLACK_BOX = ["", "👩‍🚀 is an astronaut", "héllo wörld", "日本語のテキスト", "�", "a\u0301", "\u200d", " " * 70, "\x00"]


@pytest.fixture(scope="module", params=sorted(GOLDEN))
def case(request):
    """A model's name, its tokenizer, the strings and their ids."""
    tokenizer = open_tokenizer(GGUFCheckpoint(demo_models.fetch(request.param)))
    strings = list(unicode_strings())
    return request.param, tokenizer, strings, [tokenizer.encode(text, add_special_tokens=False) for text in strings]


def test_ids(case) -> None:
    name, _, strings, ids = case
    assert _differing(GOLDEN[name]["ids"], group_hashes(ids), strings) == []


def test_texts(case) -> None:
    name, tokenizer, strings, ids = case
    texts = [tokenizer.decode(part, skip_special_tokens=False) for part in ids]
    assert _differing(GOLDEN[name]["texts"], group_hashes(texts), strings) == []


@pytest.mark.parametrize("text", BLACK_BOX)
def test_black_box_cases(case, text) -> None:
    _, tokenizer, _, _ = case
    assert tokenizer.decode(tokenizer.encode(text)) == text


def _differing(expected: list[str], got: list[str], strings: list[str]) -> list[str]:
    """Returns the first string of each group that differs."""
    pairs = zip(expected, got, strict=True)
    return [f"group {index}, {strings[index * GROUP_SIZE]!r}" for index, (a, b) in enumerate(pairs) if a != b]
