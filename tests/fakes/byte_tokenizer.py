"""Tokenizers small enough to compute by hand: one token a byte, or one a given piece of bytes."""

from collections.abc import Sequence

from jaxllm.exceptions import InvalidRequestError

_NUM_BYTES = 256


class ByteTokenizer:
    """Token i is byte i; 256 begins a text and 257 ends one. Text is UTF-8, broken bytes read as U+FFFD."""

    vocab_size: int = _NUM_BYTES + 2
    special_token_ids: frozenset[int] = frozenset({256, 257})
    bos_token_id: int | None = 256
    eos_token_ids: tuple[int, ...] = (257,)
    chat_template: str | None = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    _special_pieces = {256: b"<s>", 257: b"</s>"}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            return list(text.encode("utf-8"))
        except UnicodeEncodeError:
            raise InvalidRequestError("the text holds half of a surrogate pair", "prompt") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        pieces = [self._piece(token_id, skip_special_tokens) for token_id in ids]
        return b"".join(pieces).decode("utf-8", errors="replace")

    def files(self) -> dict[str, bytes]:
        return {}

    def _piece(self, token_id: int, skip_special_tokens: bool) -> bytes:
        if token_id in self._special_pieces:
            return b"" if skip_special_tokens else self._special_pieces[token_id]
        return bytes([token_id]) if 0 <= token_id < _NUM_BYTES else b""


class PieceTokenizer(ByteTokenizer):
    """Token i is pieces[i], any bytes; the last token ends a text. It can't encode."""

    bos_token_id: int | None = None

    def __init__(self, pieces: Sequence[bytes], strips_leading_space: bool = False) -> None:
        self._pieces = [*pieces, b"</s>"]
        self._strips_leading_space = strips_leading_space
        self.vocab_size = len(self._pieces)
        self.eos_token_ids = (len(pieces),)
        self.special_token_ids = frozenset(self.eos_token_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """As SentencePiece does, drops one leading space if `strips_leading_space`."""
        known = [i for i in ids if 0 <= i < self.vocab_size]
        shown = [i for i in known if not (skip_special_tokens and i in self.special_token_ids)]
        text = b"".join(self._pieces[i] for i in shown).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._strips_leading_space else text
