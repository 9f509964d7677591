"""Token ids in, text out, token by token, never a broken character.

Works with any Tokenizer through decode() alone. Knows nothing of stop strings or of requests.
"""

from collections.abc import Sequence

from jaxllm.tokenizer.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# Prompt tokens that come before the first generated one: some tokenizers drop a leading space without them.
_NUM_CONTEXT_TOKENS = 5
# More undecided tokens than this are no unfinished character: those have four bytes at most.
_MAX_PENDING = 16


class Detokenizer:
    """Turns one sequence's tokens into text.

    A token may hold part of a character, and its text may depend on the token before. So the last tokens
    stay in a small window, `prefix` (text already returned) and `pending` (not yet):

        new text = decode(prefix + pending) after the length of decode(prefix)

    Text that ends in U+FFFD may be half a character and waits for more tokens. The pieces that `append`
    and `flush` return add up to the text of the whole sequence.
    """

    __slots__ = ("_tokenizer", "_skip_special_tokens", "_prefix", "_pending")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._pending: list[int] = []
        prefix = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        # Half a character at the prompt's end would be counted as a whole one.
        self._prefix = [] if self._decode(prefix).endswith(REPLACEMENT) else prefix

    def append(self, token_id: int) -> str:
        """Takes the next token and returns the text that is now certain; often that token's, sometimes ""."""
        if self._is_silent(token_id):
            return ""
        self._pending.append(token_id)
        text = self._pending_text()
        if text and not text.endswith(REPLACEMENT):
            self._prefix, self._pending = self._pending, []
            return text
        return self._break_up(text) if len(self._pending) > _MAX_PENDING else ""

    def flush(self) -> str:
        """Returns what is left when the sequence has ended; U+FFFD stands for a character cut in half."""
        text = self._pending_text() if self._pending else ""
        self._prefix, self._pending = [*self._prefix, *self._pending], []
        return text

    def _is_silent(self, token_id: int) -> bool:
        # Kept out of the window, so that a long run of them can't push the context out of it.
        if not 0 <= token_id < self._tokenizer.vocab_size:
            return True
        return self._skip_special_tokens and token_id in self._tokenizer.special_token_ids

    def _break_up(self, text: str) -> str:
        """Returns all but the last few tokens' text, cut where no character is split."""
        prefix_len = len(self._decode(self._prefix))
        for cut in range(len(self._pending) - 1, len(self._pending) - 5, -1):
            head = self._decode([*self._prefix, *self._pending[:cut]])[prefix_len:]
            rest = self._decode(self._pending[cut:])
            if rest and head + rest == text:
                self._prefix, self._pending = self._pending[:cut], self._pending[cut:]
                return head
        self._prefix, self._pending = self._pending, []
        return text

    def _pending_text(self) -> str:
        return self._decode([*self._prefix, *self._pending])[len(self._decode(self._prefix)) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
