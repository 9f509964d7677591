"""SentencePiece models, trained here by the library, in each form that holds one: ids and texts equal the library's."""

import io
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece

from jaxllm.exceptions import ModelLoadError
from jaxllm.model_loader.gguf_reader import GGUFFile
from jaxllm.tokenizer.folder_tokenizer import open_folder_tokenizer
from jaxllm.tokenizer.gguf_vocabulary import open_gguf_tokenizer
from jaxllm.tokenizer.sentencepiece_model import check_charsmap, read_rules, write_model
from jaxllm.tokenizer.tokenizer import Tokenizer
from tests.fakes.unicode_strings import unicode_strings

SENTENCES = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "one two three four five six seven eight nine ten: 1234567890",
    "naïve café — ﬁne Ångström №5 ½ ① ｆｕｌｌ 日本語のテキスト 한국어 👩‍🚀 😀",
    "if x == 1:\n    return {'a': [1, 2, 3]}",
]
STRINGS = [text.replace("\0", "") for text in unicode_strings(1000)]


def _train(kind: str, **options: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 20),
        model_writer=model,
        model_type=kind,
        vocab_size=400,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    return model.getvalue()


LLAMA = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
MODELS = {
    "like Llama 2": ("bpe", LLAMA),
    "like Gemma": ("bpe", {**LLAMA, "add_dummy_prefix": False, "user_defined_symbols": ["▁▁", "▁▁▁", "<mid>"]}),
    "like T5": ("unigram", {"control_symbols": ["<x>"]}),
    "unigram with bytes": ("unigram", {"byte_fallback": True, "normalization_rule_name": "nfkc_cf"}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> bytes:
    kind, options = MODELS[request.param]
    return _train(kind, **options)


def _check(tokenizer: Tokenizer, model: bytes, before: list[int], after: list[int]) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    control = [reference.id_to_piece(i) for i in range(len(reference)) if reference.is_control(i)]
    texts = ["", " ", "  a", "a\n\n b", *[text for text in STRINGS if not any(piece in text for piece in control)]]
    assert len(texts) > 800
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text)
        assert tokenizer.encode(text) == [*before, *ids, *after]
        assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(ids)
        assert tokenizer.decode(ids[1:]) == reference.decode(ids[1:])  # may begin inside a character
        assert tokenizer.decode(ids[:-1]) == reference.decode(ids[:-1])


def _folder(path: Path, model: bytes, **config: Any) -> Tokenizer:
    (path / "tokenizer.model").write_bytes(model)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return open_folder_tokenizer(path, 1, (2,))


def test_a_tokenizer_model(model: bytes, tmp_path: Path) -> None:
    tokenizer = _folder(tmp_path, model)
    _check(tokenizer, model, [1], [])
    assert (tokenizer.vocab_size, tokenizer.files()) == (
        len(sentencepiece.SentencePieceProcessor(model_proto=model)),
        {"tokenizer.model": model},
    )


def test_the_same_in_gguf(model: bytes, tmp_path: Path) -> None:
    _check(open_gguf_tokenizer(_to_gguf(tmp_path / "x.gguf", model), 1, (2,)), model, [1], [2])


def _to_gguf(path: Path, model: bytes) -> GGUFFile:
    """Writes the vocabulary as llama.cpp's converter does, which knows the library's types by the same numbers."""
    processor, rules = sentencepiece.SentencePieceProcessor(model_proto=model), read_rules(model)
    ids = range(len(processor))
    user_defined = {"▁▁", "▁▁▁", "<mid>"}
    types = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i)
        else 4 if processor.id_to_piece(i) in user_defined and "mid" in str(model) else 1
        for i in ids
    ]  # fmt: skip
    pieces = [processor.id_to_piece(i) for i in ids]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama" if rules.kind == 2 else "t5")
    writer.add_token_list([p.replace("▁", " ") if kind == 4 else p for p, kind in zip(pieces, types, strict=True)])
    writer.add_token_scores([processor.get_score(i) for i in ids])
    writer.add_token_types(types)
    writer.add_add_space_prefix(rules.adds_prefix)
    writer.add_remove_extra_whitespaces(rules.removes_spaces)
    if rules.charsmap:
        writer.add_precompiled_charsmap(rules.charsmap)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def test_special_and_added_tokens(tmp_path: Path) -> None:
    model = _train("bpe", **LLAMA)
    size = len(sentencepiece.SentencePieceProcessor(model_proto=model))
    added = {str(size): {"content": "<|im|>", "special": True}, str(size + 1): {"content": "tool", "special": False}}
    tokenizer = _folder(tmp_path, model, bos_token="<s>", eos_token="</s>", added_tokens_decoder=added)
    ids = tokenizer.encode("<|im|>one tool<s>")
    assert ids[:2] == [1, size] and ids[-2:] == [size + 1, 1]
    assert tokenizer.decode(ids) == "one tool" and tokenizer.decode(ids, False) == "<s><|im|> one tool<s>"
    assert (tokenizer.vocab_size, tokenizer.special_token_ids) == (size + 2, {1, 2, size})
    assert tokenizer.decode([10**9, -1, size]) == ""


def test_only_the_first_part_has_a_space_before_it_where_the_config_says_so(tmp_path: Path) -> None:
    model = _train("bpe", **LLAMA)
    legacy, modern = _folder(tmp_path, model), _folder(tmp_path, model, legacy=False)
    assert legacy.encode("one</s>one", False) == [*legacy.encode("one", False), 2, *legacy.encode("one", False)]
    assert modern.decode(modern.encode("one</s>one", False), False) == "one</s>one"
    assert legacy.decode(legacy.encode("one</s>one", False), False) == "one</s> one"


@pytest.mark.parametrize(
    "config, before, after",
    [
        ({}, [1], []),
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
        ({"tokenizer_class": "T5Tokenizer"}, [], [2]),
        ({"bos_token": {"content": "</s>"}}, [2], []),
    ],
)
def test_ends(config: dict[str, Any], before: list[int], after: list[int], tmp_path: Path) -> None:
    tokenizer = _folder(tmp_path, _train("bpe", **LLAMA), **config)
    ids = tokenizer.encode("one")
    assert ids == [*before, *tokenizer.encode("one", add_special_tokens=False), *after]


def test_a_cut_off_model(tmp_path: Path) -> None:
    model = _train("unigram")
    for length in (0, 1, 7, len(model) // 2, len(model) - 1):
        with pytest.raises(ModelLoadError, match="tokenizer.model: is not a tokenizer that can be read: ") as caught:
            _folder(tmp_path, model[:length])
        assert "\n" not in str(caught.value)


def test_a_character_map_that_leads_out_of_itself(tmp_path: Path) -> None:
    model = _train("unigram")
    rules = read_rules(model)
    check_charsmap(rules.charsmap)
    for position, message in ((0, "larger than the map"), (4, "leads out of itself")):
        damaged = bytearray(rules.charsmap)
        damaged[position : position + 4] = b"\xff\xff\xff\x7f"
        with pytest.raises(ValueError, match=f"character map.*{message}"):
            check_charsmap(bytes(damaged))
    with pytest.raises(ValueError, match="names a text that it lacks"):
        check_charsmap(rules.charsmap[:-1])
    with pytest.raises(ValueError, match="larger than the map"):
        write_model(["<unk>"], [0.0], [2], rules._replace(charsmap=b"abc"))
