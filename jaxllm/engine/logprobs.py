"""TokenLogprobs from the device -> the {token id: Logprob} dicts that callers read."""

import math
from collections.abc import Sequence

from jaxllm.engine.detokenizer import REPLACEMENT
from jaxllm.messages import TokenLogprobs
from jaxllm.outputs import Logprob, PositionLogprobs
from jaxllm.tokenizer.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # stands for -inf and NaN, which JSON can't hold
_MAX_CONTEXT_TOKENS = 4  # a character has four bytes at most


class LogprobsBuilder:
    """Builds PositionLogprobs. Remembers each token's text, so it holds a vocabulary's worth at most."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def build(self, token_id: int, entry: TokenLogprobs, context: Sequence[int]) -> PositionLogprobs:
        """Returns one position's dict: the token that stands there first, then the most likely ones.

        Args:
          token_id: The token that stands at this position.
          entry: What the device reported for the position.
          context: The tokens before it; the last four are enough.
        """
        position = {token_id: Logprob(_finite(entry.logprob), entry.rank, self._decode(token_id, context))}
        for index, (top_id, logprob) in enumerate(zip(entry.top_token_ids, entry.top_logprobs, strict=True)):
            if top_id not in position:
                position[top_id] = Logprob(_finite(logprob), index + 1, self._decode(top_id, context))
        return position

    def _decode(self, token_id: int, context: Sequence[int]) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._texts[token_id] = text
        return self._decode_in_context(token_id, context) if REPLACEMENT in text else text

    def _decode_in_context(self, token_id: int, context: Sequence[int]) -> str:
        """Returns the character that a token of a few bytes completes, or "" if it completes none."""
        for num_tokens in range(1, min(_MAX_CONTEXT_TOKENS, len(context)) + 1):
            before = list(context[-num_tokens:])
            whole = self._tokenizer.decode([*before, token_id], skip_special_tokens=False)
            prefix = self._tokenizer.decode(before, skip_special_tokens=False).rstrip(REPLACEMENT)
            if whole.startswith(prefix) and REPLACEMENT not in whole[len(prefix) :]:
                return whole[len(prefix) :]
        return ""


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
