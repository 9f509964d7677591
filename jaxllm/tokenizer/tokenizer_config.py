"""What a Hugging Face folder says about its tokenizer beside the vocabulary: special and added tokens, chat template.

Reads tokenizer_config.json, added_tokens.json, special_tokens_map.json and the chat template's files, each of which may
be missing. Doesn't know the vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.exceptions import ModelLoadError
from jaxllm.model_loader.model_files import find_file, read_json, read_limited

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FLAGS = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy")
MAX_TEMPLATE_BYTES = 1 << 20


class TokenizerConfig(NamedTuple):
    """What the files say.

    Attributes:
      tokenizer_class: The name of transformers' class, or None.
      chat_template: Jinja source, or None.
      flags: Of add_bos_token, add_eos_token, add_prefix_space and legacy, those that are given.
      roles: "bos_token" and the like -> the token's text.
      special: Texts of the tokens that aren't text.
      ids: Text -> id of the tokens that are given with their ids.
    """

    tokenizer_class: str | None
    chat_template: str | None
    flags: dict[str, bool]
    roles: dict[str, str]
    special: frozenset[str]
    ids: dict[str, int]

    def tokens(self, find: Callable[[str], int | None]) -> tuple[dict[str, int], dict[str, int]]:
        """Returns text -> id of the special tokens, and of the other added ones.

        Args:
          find: Looks a token up in the vocabulary, for those whose ids aren't given. What isn't there is left out.
        """
        ids = {text: self.ids.get(text, find(text)) for text in (*self.special, *self.ids) if text}
        special = {text: token_id for text, token_id in ids.items() if token_id is not None and text in self.special}
        return special, {text: token_id for text, token_id in self.ids.items() if text and text not in self.special}


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
    """Reads the files of a folder.

    Raises:
      ModelLoadError: One is damaged.
    """
    config, where = _read(folder, "tokenizer_config.json"), folder / "tokenizer_config.json"
    named = {**_read(folder, "special_tokens_map.json"), **config}
    roles = {role: text for role in _ROLES if (text := _text(named.get(role))) is not None}
    ids = {text: _checked_id(where, token_id) for text, token_id in _read(folder, "added_tokens.json").items()}
    special = {*roles.values(), *filter(None, map(_text, _list(named.get("additional_special_tokens"))))}
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise ModelLoadError(f"{where}: added_tokens_decoder must be an object, got {decoder!r:.80}")
    for token_id, entry in decoder.items():
        text = _text(entry) if isinstance(entry, dict) else None
        if text is None or not token_id.isascii() or not token_id.isdigit():
            raise ModelLoadError(f"{where}: added_tokens_decoder has the entry {token_id!r:.40}: {entry!r:.80}")
        ids[text] = _checked_id(where, int(token_id[:20]))
        if entry.get("special") is True:
            special.add(text)
    tokenizer_class = config.get("tokenizer_class")
    return TokenizerConfig(
        tokenizer_class=tokenizer_class if isinstance(tokenizer_class, str) else None,
        chat_template=_chat_template(folder, config),
        flags={name: value for name in _FLAGS if isinstance(value := config.get(name), bool)},
        roles=roles,
        special=frozenset(special),
        ids=ids,
    )


def _read(folder: Path, name: str) -> dict[str, Any]:
    path = find_file(folder, name)
    return read_json(path) if path else {}


def _text(token: Any) -> str | None:
    """Returns a token's text; it is stored as such or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _checked_id(where: Path, token_id: Any) -> int:
    if type(token_id) is not int or not 0 <= token_id < 1 << 24:
        raise ModelLoadError(f"{where}: an added token's id must be in [0, {1 << 24}), got {token_id!r:.40}")
    return token_id


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """Returns chat_template.jinja's text, else chat_template.json's, else tokenizer_config.json's."""
    if path := find_file(folder, "chat_template.jinja"):
        try:
            return read_limited(path, MAX_TEMPLATE_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{path}: is not UTF-8") from error
    name = "chat_template.json" if find_file(folder, "chat_template.json") else "tokenizer_config.json"
    template = (_read(folder, name) if name == "chat_template.json" else config).get("chat_template")
    if isinstance(template, list):  # the old form: [{"name": "default", "template": "..."}, ...]
        return _named_templates(template).get("default")
    if not isinstance(template, (str, type(None))):
        raise ModelLoadError(f"{folder / name}: chat_template must be a string, got {template!r:.80}")
    return template


def _named_templates(entries: list[Any]) -> dict[str, str]:
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
