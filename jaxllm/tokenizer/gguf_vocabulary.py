"""Opens the tokenizer whose vocabulary stands in a GGUF file's metadata.

Three kinds are read: "gpt2" (byte-level BPE with merges), "llama" (SentencePiece's BPE with scores) and "t5"
(SentencePiece's unigram model). Doesn't know how a kind works: gguf_byte_level.py and SentencePiece do.
"""

from collections.abc import Callable

import numpy as np

from jaxllm.exceptions import ModelLoadError, UnsupportedModelError
from jaxllm.model_loader.gguf_reader import GGUFFile
from jaxllm.model_loader.model_files import reason_of
from jaxllm.tokenizer import sentencepiece_model as sp
from jaxllm.tokenizer.gguf_byte_level import build_byte_level
from jaxllm.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from jaxllm.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from jaxllm.tokenizer.tokenizer import Tokenizer

_UNKNOWN_ID = {"llama": 0, "t5": 2}  # llama.cpp's defaults


def open_gguf_tokenizer(gguf: GGUFFile, bos_token_id: int | None, eos_token_ids: tuple[int, ...]) -> Tokenizer:
    """Opens the tokenizer that a GGUF file's metadata describes.

    Raises:
      ModelLoadError: The vocabulary is missing or contradicts itself.
      UnsupportedModelError: The kind of vocabulary, or its way of splitting text, isn't known.
    """
    kind = gguf.require("tokenizer.ggml.model", str)
    if kind not in _OPENERS:
        raise UnsupportedModelError(
            f"{gguf.path}: tokenizer.ggml.model {kind!r:.80} is not supported; supported: {', '.join(_OPENERS)}"
        )
    tokens = gguf.require("tokenizer.ggml.tokens", list[str])
    if len(set(tokens)) != len(tokens):
        raise ModelLoadError(f"{gguf.path}: the vocabulary has {len(tokens) - len(set(tokens))} tokens twice")
    types = _token_types(gguf, len(tokens))
    try:
        return _OPENERS[kind](gguf, tokens, types, bos_token_id, eos_token_ids)
    except ModelLoadError:
        raise
    except Exception as error:  # the libraries raise nothing more precise
        raise ModelLoadError(f"{gguf.path}: the vocabulary can't be used: {reason_of(error)}") from error


def _open_byte_level(
    gguf: GGUFFile, tokens: list[str], types: np.ndarray, bos_token_id: int | None, eos_token_ids: tuple[int, ...]
) -> Tokenizer:
    return HuggingFaceTokenizer(
        build_byte_level(gguf, tokens, types),
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
        chat_template=_chat_template(gguf),
    )


def _open_sentencepiece(
    gguf: GGUFFile, tokens: list[str], types: np.ndarray, bos_token_id: int | None, eos_token_ids: tuple[int, ...]
) -> Tokenizer:
    is_unigram = gguf.require("tokenizer.ggml.model", str) == "t5"
    scores = gguf.require("tokenizer.ggml.scores", np.ndarray)
    if len(scores) != len(tokens) or not np.all(np.isfinite(scores)):
        raise ModelLoadError(f"{gguf.path}: expected {len(tokens)} finite token scores, got {len(scores)}")
    charsmap = gguf.get("tokenizer.ggml.precompiled_charsmap", np.ndarray)
    rules = sp.Rules(
        kind=sp.UNIGRAM if is_unigram else sp.BPE,
        adds_prefix=_flag(gguf, "add_space_prefix", default=not is_unigram),
        removes_spaces=_flag(gguf, "remove_extra_whitespaces", default=False),
        has_bytes=bool(np.any(types == sp.BYTE)),
        charsmap=b"" if charsmap is None else charsmap.astype(np.uint8).tobytes(),
    )
    # llama.cpp writes the spaces of such tokens as spaces.
    pieces = [token.replace(" ", sp.SPACE) if types[i] == sp.USER_DEFINED else token for i, token in enumerate(tokens)]
    return SentencePieceTokenizer(
        sp.write_model(pieces, scores.tolist(), _piece_types(gguf, types).tolist(), rules),
        special={
            tokens[token_id]: int(token_id) for token_id in np.flatnonzero(types == sp.CONTROL) if tokens[token_id]
        },
        added={},
        before=_end(gguf, "bos", tokens, default=not is_unigram),
        after=_end(gguf, "eos", tokens, default=is_unigram),
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
        chat_template=_chat_template(gguf),
    )


_Opener = Callable[[GGUFFile, list[str], np.ndarray, int | None, tuple[int, ...]], Tokenizer]
_OPENERS: dict[str, _Opener] = {"gpt2": _open_byte_level, "llama": _open_sentencepiece, "t5": _open_sentencepiece}


def _token_types(gguf: GGUFFile, num_tokens: int) -> np.ndarray:
    types = gguf.get("tokenizer.ggml.token_type", np.ndarray)
    if types is None:
        return np.full(num_tokens, sp.NORMAL)
    if len(types) != num_tokens or np.any((types < sp.NORMAL) | (types > sp.BYTE)):
        raise ModelLoadError(f"{gguf.path}: expected {num_tokens} token types of 1 to 6, got {len(types)}")
    return types.astype(np.int64)


def _piece_types(gguf: GGUFFile, types: np.ndarray) -> np.ndarray:
    """Returns the types with exactly one unknown piece, as SentencePiece wants it; some files call it control."""
    named = gguf.get("tokenizer.ggml.unknown_token_id", int)
    marked = np.flatnonzero(types == sp.UNKNOWN)
    unknown_id = int(marked[0]) if len(marked) else _UNKNOWN_ID[gguf.require("tokenizer.ggml.model", str)]
    unknown_id = unknown_id if named is None else named
    if not 0 <= unknown_id < len(types):
        raise ModelLoadError(f"{gguf.path}: unknown_token_id must be in [0, {len(types)}), got {unknown_id}")
    changed = np.where(types == sp.UNKNOWN, sp.CONTROL, types)
    changed[unknown_id] = sp.UNKNOWN
    return changed


def _flag(gguf: GGUFFile, name: str, default: bool) -> bool:
    value = gguf.get(f"tokenizer.ggml.{name}", bool)
    return default if value is None else value


def _end(gguf: GGUFFile, name: str, tokens: list[str], default: bool) -> list[int]:
    """Returns what is put before ("bos") or after ("eos") a text: one id or none."""
    if not _flag(gguf, f"add_{name}_token", default):
        return []
    token_id = gguf.require(f"tokenizer.ggml.{name}_token_id", int)
    if not 0 <= token_id < len(tokens):
        raise ModelLoadError(f"{gguf.path}: {name}_token_id must be in [0, {len(tokens)}), got {token_id}")
    return [token_id]


def _chat_template(gguf: GGUFFile) -> str | None:
    return gguf.get("tokenizer.chat_template", str)
