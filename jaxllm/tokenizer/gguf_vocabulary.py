"""Builds a tokenizers.Tokenizer from the vocabulary in a GGUF file's metadata.

Two kinds are read: "gpt2" (byte-level BPE with merges) and "llama" (SentencePiece BPE with scores). How a
byte-level vocabulary splits text first has only a name in GGUF; the table here gives each name its rule.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxllm.exceptions import ModelLoadError, UnsupportedModelError
from jaxllm.model_loader.gguf_reader import GGUFFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # llama.cpp's token types

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


def build_gguf_tokenizer(gguf: GGUFFile) -> Tokenizer:
    """Builds the tokenizer that a GGUF file's metadata describes.

    Raises:
      ModelLoadError: The vocabulary is missing or contradicts itself.
      UnsupportedModelError: The kind of vocabulary, or its way of splitting text, isn't known.
    """
    kind = gguf.require("tokenizer.ggml.model", str)
    if kind not in _BUILDERS:
        raise UnsupportedModelError(
            f"{gguf.path}: tokenizer.ggml.model {kind!r:.80} is not supported; supported: {', '.join(_BUILDERS)}"
        )
    tokens = gguf.require("tokenizer.ggml.tokens", list[str])
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelLoadError(f"{gguf.path}: the vocabulary has {len(tokens) - len(vocabulary)} tokens twice")
    types = _token_types(gguf, len(tokens))
    try:
        tokenizer, adds_bos = _BUILDERS[kind](gguf, vocabulary, types)
        _add_special_tokens(tokenizer, tokens, types)
        _add_bos_and_eos(gguf, tokenizer, tokens, adds_bos)
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises nothing more precise
        reason = (str(error).splitlines() or ["it is damaged"])[0][:200]
        raise ModelLoadError(f"{gguf.path}: the vocabulary can't be used: {reason}") from error
    return tokenizer


def _build_byte_level(gguf: GGUFFile, vocabulary: dict[str, int], types: np.ndarray) -> tuple[Tokenizer, bool]:
    """Returns a byte-level BPE tokenizer, and whether it begins texts with BOS where the file doesn't say."""
    del types  # bytes are ordinary tokens here
    name = gguf.get("tokenizer.ggml.pre", str) or "default"
    if name not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{gguf.path}: tokenizer.ggml.pre {name!r:.80} is not supported; "
            f"supported: {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    pre = _PRE_TOKENIZERS[name]
    merges = [_split_merge(gguf, merge) for merge in gguf.require("tokenizer.ggml.merges", list[str])]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.ignore_merges))
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if pre.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, pre.adds_bos


def _split_merge(gguf: GGUFFile, merge: str) -> tuple[str, str]:
    """Splits "Ġ t" into ("Ġ", "t")."""
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ModelLoadError(f"{gguf.path}: a merge must be two tokens with a space between, got {merge!r:.80}")
    return left, right


def _build_sentencepiece(gguf: GGUFFile, vocabulary: dict[str, int], types: np.ndarray) -> tuple[Tokenizer, bool]:
    """Returns the tokenizer of a SentencePiece BPE vocabulary, which begins texts with BOS by default.

    SentencePiece joins the pair whose union scores highest; as merges that is every split of every token,
    best score first.
    """
    scores = gguf.require("tokenizer.ggml.scores", np.ndarray)
    if len(scores) != len(vocabulary) or not np.all(np.isfinite(scores)):
        raise ModelLoadError(f"{gguf.path}: expected {len(vocabulary)} finite token scores, got {len(scores)}")
    ranked: list[tuple[float, int, str, str]] = []
    for token, token_id in vocabulary.items():
        if types[token_id] in (_NORMAL, _USER_DEFINED, _UNUSED):
            ranked += [
                (-float(scores[token_id]), token_id, token[:cut], token[cut:])
                for cut in range(1, len(token))
                if token[:cut] in vocabulary and token[cut:] in vocabulary
            ]
    merges = [(left, right) for _, _, left, right in sorted(ranked)]
    unknown = np.flatnonzero(types == _UNKNOWN)
    unknown_token = next((token for token, i in vocabulary.items() if len(unknown) and i == unknown[0]), None)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=True)
    )
    has_prefix = gguf.get("tokenizer.ggml.add_space_prefix", bool) is not False
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_prefix else spaces
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer, True


_Builder = Callable[[GGUFFile, dict[str, int], np.ndarray], tuple[Tokenizer, bool]]
_BUILDERS: dict[str, _Builder] = {"gpt2": _build_byte_level, "llama": _build_sentencepiece}


def _token_types(gguf: GGUFFile, num_tokens: int) -> np.ndarray:
    types = gguf.get("tokenizer.ggml.token_type", np.ndarray)
    if types is None:
        return np.full(num_tokens, _NORMAL)
    if len(types) != num_tokens:
        raise ModelLoadError(f"{gguf.path}: expected {num_tokens} token types, got {len(types)}")
    return types


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: np.ndarray) -> None:
    """Marks the tokens that are found in a text before it is split; of them, control tokens are special."""
    added = [
        AddedToken(tokens[token_id], special=bool(types[token_id] == _CONTROL), normalized=False)
        for token_id in np.flatnonzero((types == _CONTROL) | (types == _USER_DEFINED))
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
