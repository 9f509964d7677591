"""HuggingFaceTokenizer: texts and token ids by the `tokenizers` library. Knows no files."""

from collections.abc import Sequence

import tokenizers

from jaxllm.exceptions import InvalidRequestError
from jaxllm.model_loader.model_files import reason_of
from jaxllm.tokenizer.tokenizer import check_unicode


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
        check_unicode(text)
        # The batch form lets other threads run meanwhile; `encode` would hold them up for seconds on a long text.
        try:
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except Exception as error:  # a damaged vocabulary shows late: the piece for unknown text may lack
            reason = reason_of(error)
            raise InvalidRequestError(f"the model's tokenizer can't encode the prompt: {reason}", "prompt") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def files(self) -> dict[str, bytes]:
        """Returns what other programs load this tokenizer from: file name -> content."""
        return {"tokenizer.json": self._backend.to_str().encode()}
