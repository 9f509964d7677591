"""Opens the tokenizer that a checkpoint brings, on the `tokenizers` library. Imports no jax.

Doesn't know vocabularies' formats: gguf_vocabulary.py and the library do.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxllm.exceptions import InvalidRequestError, ModelLoadError
from jaxllm.model_loader.checkpoint import OpenedModel
from jaxllm.model_loader.gguf_checkpoint import GGUFCheckpoint
from jaxllm.model_loader.hf_config import token_ids
from jaxllm.model_loader.model_files import read_json, refuse_lfs_pointer
from jaxllm.model_loader.orbax_checkpoint import OrbaxCheckpoint
from jaxllm.tokenizer.gguf_vocabulary import build_gguf_tokenizer
from jaxllm.tokenizer.tokenizer import Tokenizer

MAX_TOKENIZER_BYTES = 1 << 28


def open_tokenizer(checkpoint: OpenedModel) -> Tokenizer:
    """Opens the tokenizer that a checkpoint brings.

    Raises:
      ModelLoadError: It has none, or a damaged one.
      UnsupportedModelError: Its vocabulary is of a kind that isn't read.
    """
    gguf = checkpoint.gguf if isinstance(checkpoint, GGUFCheckpoint | OrbaxCheckpoint) else None
    if gguf is not None:
        backend, chat_template = build_gguf_tokenizer(gguf), gguf.get("tokenizer.chat_template", str)
    else:
        backend, chat_template = _read_tokenizer_json(checkpoint.path), _folder_template(checkpoint.path)
    bos_ids = token_ids(checkpoint.config, "bos_token_id")
    return HuggingFaceTokenizer(
        backend,
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=token_ids(checkpoint.config, "eos_token_id"),
        chat_template=chat_template,
    )


class HuggingFaceTokenizer:
    """Implements Tokenizer on tokenizers.Tokenizer."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        chat_template: str | None,
    ) -> None:
        self._backend = backend
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the prompt must be valid Unicode: half of a surrogate pair stands at character {error.start}",
                "prompt",
            ) from error
        # The batch form lets other threads run meanwhile; `encode` would hold them up for seconds on a long text.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def to_json(self) -> str:
        """Returns the tokenizer in the form of a tokenizer.json file."""
        return self._backend.to_str()


def _read_tokenizer_json(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelLoadError(f"{folder}: has no tokenizer.json; add the model's, beside config.json")
    refuse_lfs_pointer(path)
    size = path.stat().st_size
    if size > MAX_TOKENIZER_BYTES:
        raise ModelLoadError(f"{path}: may have at most {MAX_TOKENIZER_BYTES} bytes, got {size}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        reason = (str(error).splitlines() or ["it is damaged"])[0][:200]
        raise ModelLoadError(f"{path}: is not a tokenizer that can be read: {reason}") from error
    # Some files bring the lengths of a training run; a prompt must neither be cut nor filled up.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _folder_template(folder: Path) -> str | None:
    """Returns chat_template.jinja's text, else tokenizer_config.json's chat_template."""
    template_path, config_path = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if template_path.exists():
        refuse_lfs_pointer(template_path)
        try:
            return template_path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{template_path}: is not UTF-8") from error
    if not config_path.exists():
        return None
    template = read_json(config_path).get("chat_template")
    if isinstance(template, list):  # the old form: [{"name": "default", "template": "..."}, ...]
        return _named_templates(template).get("default")
    if not isinstance(template, (str, type(None))):
        raise ModelLoadError(f"{config_path}: chat_template must be a string, got {template!r:.80}")
    return template


def _named_templates(entries: list[Any]) -> dict[str, str]:
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
