"""Opens the tokenizer of a Hugging Face folder from whichever of its forms is there.

tokenizer.json holds everything. tokenizer.model is SentencePiece's, and vocab.json with merges.txt GPT-2's; what they
lack stands in tokenizer_config.json. Anything else is left to transformers, where that is installed.
"""

from pathlib import Path
from typing import Any

import tokenizers

from jaxllm.exceptions import ModelLoadError
from jaxllm.model_loader.model_files import find_file, read_json, read_limited, reason_of
from jaxllm.tokenizer.auto_tokenizer import open_auto_tokenizer
from jaxllm.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from jaxllm.tokenizer.sentencepiece_model import read_rules
from jaxllm.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer, pieces_of
from jaxllm.tokenizer.tokenizer import Tokenizer
from jaxllm.tokenizer.tokenizer_config import TokenizerConfig, read_tokenizer_config

MAX_TOKENIZER_BYTES = 1 << 28
_GPT2_CLASSES = (None, "GPT2Tokenizer", "GPT2TokenizerFast")
_NO_BOS_CLASSES = ("T5Tokenizer", "T5TokenizerFast")


def open_folder_tokenizer(folder: Path, bos_token_id: int | None, eos_token_ids: tuple[int, ...]) -> Tokenizer:
    """Opens the tokenizer of a Hugging Face folder.

    Args:
      bos_token_id, eos_token_ids: What the model's config says.

    Raises:
      ModelLoadError: There is none, or a damaged one.
    """
    config = read_tokenizer_config(folder)
    ends: dict[str, Any] = {
        "bos_token_id": bos_token_id,
        "eos_token_ids": eos_token_ids,
        "chat_template": config.chat_template,
    }
    if path := find_file(folder, "tokenizer.json"):
        return HuggingFaceTokenizer(_guarded(path, _read_tokenizer_json), **ends)
    if path := find_file(folder, "tokenizer.model"):
        return _guarded(path, lambda path: _open_sentencepiece(path, config, ends))
    vocabulary, merges = find_file(folder, "vocab.json"), find_file(folder, "merges.txt")
    if vocabulary and merges and config.tokenizer_class in _GPT2_CLASSES:
        return HuggingFaceTokenizer(_guarded(merges, lambda path: _build_gpt2(vocabulary, path, config)), **ends)
    return open_auto_tokenizer(folder, **ends)


def _guarded(path: Path, read: Any) -> Any:
    try:
        return read(path)
    except ModelLoadError:
        raise
    except Exception as error:  # the libraries raise nothing more precise
        raise ModelLoadError(f"{path}: is not a tokenizer that can be read: {reason_of(error)}") from error


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_buffer(read_limited(path, MAX_TOKENIZER_BYTES))
    # Some files bring the lengths of a training run; a prompt must neither be cut nor filled up.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _open_sentencepiece(path: Path, config: TokenizerConfig, ends: dict[str, Any]) -> Tokenizer:
    model = read_limited(path, MAX_TOKENIZER_BYTES)
    rules, vocabulary = read_rules(model), pieces_of(model)
    special, added = config.tokens(vocabulary.get)
    has_no_bos = config.tokenizer_class in _NO_BOS_CLASSES
    bos_id = special.get(config.roles.get("bos_token", ""), rules.bos_id)
    eos_id = special.get(config.roles.get("eos_token", ""), rules.eos_id)
    return SentencePieceTokenizer(
        model,
        special=special,
        added=added,
        before=[bos_id] if config.flags.get("add_bos_token", not has_no_bos) and bos_id >= 0 else [],
        after=[eos_id] if config.flags.get("add_eos_token", has_no_bos) and eos_id >= 0 else [],
        prefixes_parts=config.flags.get("legacy", True),
        **ends,
    )


def _build_gpt2(vocabulary_path: Path, merges_path: Path, config: TokenizerConfig) -> tokenizers.Tokenizer:
    vocabulary = read_json(vocabulary_path)
    if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in vocabulary.values()):
        raise ModelLoadError(f"{vocabulary_path}: each token must have an id of at least 0")
    lines = read_limited(merges_path, MAX_TOKENIZER_BYTES).decode("utf-8").split("\n")
    pairs = [_split_merge(merges_path, line) for line in lines if line and not line.startswith("#version")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=pairs))
    prefix = config.flags.get("add_prefix_space", False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special, added = config.tokens(vocabulary.get)
    for text, token_id in sorted({**added, **special}.items(), key=lambda item: item[1]):
        token = tokenizers.AddedToken(text, normalized=False, special=text in special)
        # The library gives new tokens the ids after the vocabulary's.
        (tokenizer.add_special_tokens if text in special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(text) != token_id:
            raise ModelLoadError(f"{vocabulary_path}: token {text!r:.80} can't have the id {token_id}")
    bos = config.roles.get("bos_token")
    if config.flags.get("add_bos_token", False) and bos in special:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=["bos:0", "$A:0"],
            pair=["bos:0", "$A:0", "$B:1"],
            special_tokens=[{"id": "bos", "ids": [special[bos]], "tokens": [bos]}],
        )
    return tokenizer


def _split_merge(path: Path, line: str) -> tuple[str, str]:
    left, _, right = line.rstrip("\r").partition(" ")
    if not left or not right:
        raise ModelLoadError(f"{path}: a merge must be two tokens with a space between, got {line!r:.80}")
    return left, right
