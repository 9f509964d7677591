"""Outputs that hold everything so far -> what is new since the last time, completion by completion."""

from typing import NamedTuple

from jaxllm.outputs import CompletionOutput, RequestOutput


class _Sent(NamedTuple):
    num_chars: int
    num_tokens: int
    is_finished: bool


_NOTHING = _Sent(0, 0, False)


class News(NamedTuple):
    part: CompletionOutput  # what is new, and nothing else
    is_first: bool  # whether nothing has been taken of this completion before


class Deltas:
    """Remembers what has been taken of one request."""

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}

    def take(self, output: RequestOutput) -> list[News]:
        """Returns the completions that have news."""
        news = [self._take_one(completion) for completion in output.outputs]
        return [one for one in news if one is not None]

    def _take_one(self, completion: CompletionOutput) -> News | None:
        sent = self._sent.get(completion.index, _NOTHING)
        has_news = len(completion.token_ids) > sent.num_tokens or len(completion.text) > sent.num_chars
        if sent.is_finished or not (has_news or completion.finished):
            return None
        part = CompletionOutput(
            index=completion.index,
            text=completion.text[sent.num_chars :],
            token_ids=completion.token_ids[sent.num_tokens :],
            logprobs=None if completion.logprobs is None else completion.logprobs[sent.num_tokens :],
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        is_first = completion.index not in self._sent
        self._sent[completion.index] = _Sent(len(completion.text), len(completion.token_ids), completion.finished)
        return News(part, is_first)
