"""Builds a byte-level BPE tokenizer from the vocabulary and the merges in a GGUF file's metadata.

How a vocabulary splits text first has only a name in GGUF; the table here gives each name its rule.
"""

from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxllm.exceptions import ModelLoadError, UnsupportedModelError
from jaxllm.model_loader.gguf_reader import GGUFFile
from jaxllm.tokenizer.sentencepiece_model import CONTROL, USER_DEFINED

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_DEFAULT_WORDS = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")


class _PreTokenizer(NamedTuple):
    """How one tokenizer.ggml.pre splits text."""

    patterns: tuple[str, ...]  # applied one after the other; each match stands alone
    ignore_merges: bool = False  # a whole word of the vocabulary needs no merges
    adds_bos: bool = False  # where the file doesn't say
    is_nfc: bool = False


_GPT2 = _PreTokenizer((_GPT2_WORDS,))
_SMOLLM = _PreTokenizer((r"\p{N}", _GPT2_WORDS))
_LLAMA3 = _PreTokenizer((_LLAMA3_WORDS,), ignore_merges=True, adds_bos=True)
_QWEN2 = _PreTokenizer((_QWEN2_WORDS,), is_nfc=True)
_PRE_TOKENIZERS = {
    "default": _PreTokenizer(_DEFAULT_WORDS),
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def build_byte_level(gguf: GGUFFile, tokens: list[str], types: np.ndarray) -> Tokenizer:
    """Builds the byte-level BPE tokenizer of a vocabulary.

    Args:
      types: Each token's type in llama.cpp's numbers.

    Raises:
      ModelLoadError: The merges are missing or damaged, or a special token lacks.
      UnsupportedModelError: The way of splitting text isn't known.
    """
    name = gguf.get("tokenizer.ggml.pre", str) or "default"
    if name not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{gguf.path}: tokenizer.ggml.pre {name!r:.80} is not supported; "
            f"supported: {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    pre = _PRE_TOKENIZERS[name]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [_split_merge(gguf, merge) for merge in gguf.require("tokenizer.ggml.merges", list[str])]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.ignore_merges))
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if pre.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    _add_special_tokens(tokenizer, tokens, types)
    _add_bos_and_eos(gguf, tokenizer, tokens, pre.adds_bos)
    return tokenizer


def _split_merge(gguf: GGUFFile, merge: str) -> tuple[str, str]:
    """Splits "Ġ t" into ("Ġ", "t")."""
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ModelLoadError(f"{gguf.path}: a merge must be two tokens with a space between, got {merge!r:.80}")
    return left, right


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: np.ndarray) -> None:
    """Marks the tokens that are found in a text before it is split; of them, control tokens are special."""
    added = [
        AddedToken(tokens[token_id], special=bool(types[token_id] == CONTROL), normalized=False)
        for token_id in np.flatnonzero((types == CONTROL) | (types == USER_DEFINED))
        if tokens[token_id]
    ]
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])


def _add_bos_and_eos(gguf: GGUFFile, tokenizer: Tokenizer, tokens: list[str], adds_bos: bool) -> None:
    """Makes the tokenizer put BOS before, and EOS after, a text where the file asks for it."""
    flag = gguf.get("tokenizer.ggml.add_bos_token", bool)
    parts: dict[str, tuple[str, int]] = {}
    if adds_bos if flag is None else flag:
        parts["bos"] = _named_token(gguf, "bos", tokens)
    if gguf.get("tokenizer.ggml.add_eos_token", bool):
        parts["eos"] = _named_token(gguf, "eos", tokens)
    if not parts:
        return
    before = ["bos:0"] if "bos" in parts else []
    after = ["eos:0"] if "eos" in parts else []
    # A second text never comes, but the library wants a rule for pairs.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A:0", *after],
        pair=[*before, "$A:0", *after, "$B:1"],
        special_tokens=[{"id": name, "ids": [i], "tokens": [token]} for name, (token, i) in parts.items()],
    )


def _named_token(gguf: GGUFFile, name: str, tokens: list[str]) -> tuple[str, int]:
    token_id = gguf.require(f"tokenizer.ggml.{name}_token_id", int)
    if not 0 <= token_id < len(tokens):
        raise ModelLoadError(f"{gguf.path}: {name}_token_id must be in [0, {len(tokens)}), got {token_id}")
    return tokens[token_id], token_id
