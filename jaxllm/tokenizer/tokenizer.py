"""What the engine needs of a tokenizer: text <-> token ids. loader.py opens the one that a checkpoint brings.

Doesn't know how a stream of tokens becomes text piece by piece (engine/detokenizer.py), nor chat templates'
language (chat_template.py).
"""

from collections.abc import Sequence
from typing import Protocol

from jaxllm.exceptions import InvalidRequestError


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer.

    Attributes:
      vocab_size: One more than the largest token id.
      special_token_ids: Ids that skip_special_tokens leaves out of texts.
      bos_token_id: The id that begins a text, or None.
      eos_token_ids: The ids that end a text; may be empty.
      chat_template: Jinja source, or None.
    """

    vocab_size: int
    special_token_ids: frozenset[int]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the text's token ids; add_special_tokens adds what the model wants around a text.

        Raises:
          InvalidRequestError: The text holds half of a surrogate pair, which is no character.
        """
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the tokens' text. Ids that the vocabulary lacks contribute nothing."""
        ...

    def files(self) -> dict[str, bytes]:
        """Returns what other programs load this tokenizer from: file name -> content; empty where there is none."""
        ...


def check_unicode(text: str) -> None:
    """Checks that a text can be written as UTF-8.

    Raises:
      InvalidRequestError: It holds half of a surrogate pair.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the prompt must be valid Unicode: half of a surrogate pair stands at character {error.start}", "prompt"
        ) from error
