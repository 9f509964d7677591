"""The tokenizer of a model that has only a config.json: any text becomes ids, any ids become letters."""

from collections.abc import Sequence


class DummyTokenizer:
    """Implements Tokenizer without a vocabulary: a token is a byte, and its text a letter."""

    special_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [byte % self.vocab_size for byte in text.encode("utf-8", "replace")]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + token_id % 26) for token_id in ids if 0 <= token_id < self.vocab_size)

    def files(self) -> dict[str, bytes]:
        """Returns nothing: no other program could load it."""
        return {}
