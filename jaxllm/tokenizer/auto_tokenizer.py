"""The last resort: a folder's tokenizer by transformers, where that is installed. Code of the folder is never run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxllm.exceptions import ModelLoadError
from jaxllm.model_loader.model_files import reason_of
from jaxllm.tokenizer.tokenizer import check_unicode


def open_auto_tokenizer(
    folder: Path, *, bos_token_id: int | None, eos_token_ids: tuple[int, ...], chat_template: str | None
) -> "AutoTokenizer":
    """Lets transformers read a folder that has none of the files that we read ourselves.

    Raises:
      ModelLoadError: transformers isn't installed, or can't read it either.
    """
    try:
        import transformers
    except ImportError:
        raise ModelLoadError(
            f"{folder}: has no tokenizer.json, tokenizer.model, or vocab.json with merges.txt; add the model's, beside "
            "config.json, or install transformers, which reads rarer kinds"
        ) from None
    try:
        backend = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # it raises whatever its readers do
        raise ModelLoadError(f"{folder}: transformers can't read its tokenizer: {reason_of(error)}") from error
    return AutoTokenizer(backend, bos_token_id, eos_token_ids, chat_template)


class AutoTokenizer:
    """Implements Tokenizer on one of transformers' tokenizers."""

    def __init__(
        self, backend: Any, bos_token_id: int | None, eos_token_ids: tuple[int, ...], chat_template: str | None
    ) -> None:
        self._backend = backend
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        self.special_token_ids = frozenset(backend.all_special_ids)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_unicode(text)
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        text: str = self._backend.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def files(self) -> dict[str, bytes]:
        return {}
