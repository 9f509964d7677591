"""The forms of a Hugging Face folder's tokenizer: GPT-2's two files, links, the wrong model's, the last resort."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm.exceptions import ModelLoadError
from jaxllm.model_loader.safetensors_reader import HuggingFaceCheckpoint
from jaxllm.tokenizer.folder_tokenizer import open_folder_tokenizer
from jaxllm.tokenizer.loader import open_tokenizer
from jaxllm.tokenizer.tokenizer import Tokenizer
from tests.fakes.tiny_models import tiny_llama, write_tiny_folder
from tests.fakes.unicode_strings import unicode_strings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_folder(tmp_path / "tiny", tiny_llama())


def _open(folder: Path) -> Tokenizer:
    return open_folder_tokenizer(folder, 1, (2,))


def _split_in_two(folder: Path, **config: Any) -> None:
    """Writes vocab.json and merges.txt in place of tokenizer.json, as GPT-2's and OPT's folders have them."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    (folder / "merges.txt").write_text("\n".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").unlink()


def test_vocab_and_merges_are_the_same_tokenizer(folder: Path) -> None:
    whole = _open(folder)
    special = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "unk_token": "<|endoftext|>"}
    _split_in_two(folder, tokenizer_class="GPT2Tokenizer", **special)
    parts = _open(folder)
    for text in unicode_strings(300):
        assert parts.encode(text) == whole.encode(text)
        assert parts.decode(parts.encode(text)) == whole.decode(whole.encode(text))
    assert parts.special_token_ids == whole.special_token_ids == {0, 1, 2}


def test_opt_begins_with_bos_and_has_added_tokens(folder: Path) -> None:
    decoder = {"300": {"content": "<pad>", "special": True}, "301": {"content": "tool", "special": False}}
    bos = {"__type": "AddedToken", "content": "<|im_start|>"}
    _split_in_two(folder, add_bos_token=True, bos_token=bos, pad_token="<pad>", added_tokens_decoder=decoder)
    tokenizer = _open(folder)
    assert tokenizer.encode("a<pad>tool") == [1, *tokenizer.encode("a", add_special_tokens=False), 300, 301]
    assert tokenizer.decode([1, 300, 301]) == "tool" and tokenizer.vocab_size == 302


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("merges.txt", "#version: 0.2\nab\n", "a merge must be two tokens with a space between, got 'ab'"),
        ("merges.txt", "a zzz\n", "merges.txt: is not a tokenizer that can be read: .*zzz"),
        ("vocab.json", '{"a": -1}', "each token must have an id of at least 0"),
        ("vocab.json", "[]", "must be a JSON object"),
        ("added_tokens.json", '{"x": -1}', "an added token's id must be in"),
        ("added_tokens.json", '{"x": 999}', "token 'x' can't have the id 999"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"-1": {"content": "x"}}}', "has the entry '-1'"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": 2}}', "has the entry '1': 2"),
    ],
)
def test_damaged_parts(name: str, text: str, message: str, folder: Path) -> None:
    _split_in_two(folder)
    (folder / name).write_text(text)
    with pytest.raises(ModelLoadError, match=message) as caught:
        _open(folder)
    assert "\n" not in str(caught.value)


def test_chat_template_json(folder: Path) -> None:
    (folder / "chat_template.json").write_text('{"chat_template": "hello"}')
    assert _open(folder).chat_template == "hello"


def test_another_models_tokenizer(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text())
    for vocab_size, is_refused in ((100, True), (235, True), (236, False), (300, False), (1000, False)):
        config_path.write_text(json.dumps({**config, "vocab_size": vocab_size}))
        if is_refused:
            with pytest.raises(
                ModelLoadError, match=f"has ids up to 299, the model {vocab_size} logits; the tokenizer"
            ):
                open_tokenizer(HuggingFaceCheckpoint(folder))
        else:
            open_tokenizer(HuggingFaceCheckpoint(folder))


def test_links_lead_nowhere_else(folder: Path, tmp_path: Path) -> None:
    path = folder / "tokenizer.json"
    path.rename(tmp_path / "outside.json")
    path.symlink_to(tmp_path / "outside.json")
    with pytest.raises(ModelLoadError, match="tokenizer.json: is a link that leads out of its folder"):
        _open(folder)
    (tmp_path / "outside.json").rename(folder / "inside.json")
    path.unlink()
    path.symlink_to("inside.json")
    _open(folder)


def test_links_of_the_hubs_cache(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "models--org--name"
    snapshot = model / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    for index, file in enumerate(sorted(folder.iterdir())):
        file.rename(model / "blobs" / str(index))
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(index))
    assert open_tokenizer(HuggingFaceCheckpoint(snapshot)).vocab_size == 300


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(ModelLoadError, match="tokenizer.json: can't be read: it is no regular file"):
        _open(folder)


class _Backend:
    """Stands for one of transformers' tokenizers: a token a letter, 26 ends."""

    all_special_ids = (26,)

    def get_vocab(self) -> dict[str, int]:
        return {**{chr(ord("a") + i): i for i in range(26)}, "</s>": 26}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) - ord("a") for letter in text] + [26] * add_special_tokens

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not clean_up_tokenization_spaces
        return "".join("" if i == 26 and skip_special_tokens else [*self.get_vocab()][i] for i in ids)


def test_transformers_is_the_last_resort_and_runs_no_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def from_pretrained(name: str, **kwargs: Any) -> _Backend:
        calls.append((name, kwargs))
        return _Backend()

    fake = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "transformers", fake)
    _open(folder)
    assert calls == []
    (folder / "tokenizer.json").unlink()
    tokenizer = _open(folder)
    assert calls == [(str(folder), {"local_files_only": True, "trust_remote_code": False})]
    assert tokenizer.encode("ab") == [0, 1, 26] and tokenizer.encode("ab", add_special_tokens=False) == [0, 1]
    assert tokenizer.decode([0, 26, 99, -1]) == "a" and tokenizer.decode([0, 26], False) == "a</s>"
    assert (tokenizer.vocab_size, tokenizer.special_token_ids, tokenizer.files()) == (27, {26}, {})


def test_transformers_cant_either(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_pretrained(name: str, **kwargs: Any) -> None:
        raise OSError("no such thing\nand more")

    fake = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "transformers", fake)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match="transformers can't read its tokenizer: no such thing$"):
        _open(folder)
