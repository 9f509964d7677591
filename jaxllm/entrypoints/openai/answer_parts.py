"""The parts that answers are made of: usage, log probabilities in both forms, what is new in a sequence.

Plain dicts, encoded as they are. Knows outputs, not requests nor HTTP.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxllm.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput


class Delta(NamedTuple):
    """What came to one sequence since it was last looked at."""

    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs]  # empty where none were asked for


class SequenceCursor:
    """How much of one sequence has been sent."""

    __slots__ = ("_num_chars", "_num_tokens", "is_finished")

    def __init__(self) -> None:
        self._num_chars = 0
        self._num_tokens = 0
        self.is_finished = False

    def advance(self, output: CompletionOutput) -> Delta:
        """Returns what is new in a sequence's output, and counts it as sent."""
        start = self._num_tokens
        logprobs = [] if output.logprobs is None else output.logprobs[start:]
        delta = Delta(output.text[self._num_chars :], output.token_ids[start:], logprobs)
        self._num_chars, self._num_tokens = len(output.text), len(output.token_ids)
        return delta


class CompletionLogprobs:
    """Log probabilities in the form of /v1/completions; one for each sequence, since text offsets run on."""

    __slots__ = ("_offset",)

    def __init__(self) -> None:
        self._offset = 0

    def take(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None], first_text: str = ""
    ) -> dict[str, Any]:
        """Returns the next positions; one without log probabilities is a prompt's first token, of `first_text`."""
        tokens, logprobs, tops, offsets = [], [], [], []
        for token_id, position in zip(token_ids, positions, strict=True):
            entry = None if position is None else position[token_id]
            text = first_text if entry is None else entry.decoded_token
            tokens.append(text)
            logprobs.append(None if entry is None else entry.logprob)
            tops.append(None if position is None else _by_text(position))
            offsets.append(self._offset)
            self._offset += len(text)
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}


def chat_logprobs(token_ids: Sequence[int], positions: Sequence[PositionLogprobs], num_top: int) -> dict[str, Any]:
    """Returns log probabilities in the form of /v1/chat/completions."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        likeliest = sorted(position.values(), key=lambda entry: entry.rank)[:num_top]
        content.append({**_chat_entry(position[token_id]), "top_logprobs": [_chat_entry(entry) for entry in likeliest]})
    return {"content": content}


def prompt_logprobs(positions: Iterable[PositionLogprobs | None] | None) -> list[Any] | None:
    """Returns a prompt's log probabilities as vLLM gives them: one object a token, null for the first."""
    if positions is None:
        return None
    return [
        None if position is None else {str(token_id): entry._asdict() for token_id, entry in position.items()}
        for position in positions
    ]


def usage(outputs: Iterable[RequestOutput], hides_tokens: bool = False) -> dict[str, Any]:
    """Counts a request's tokens: each prompt once, all of its sequences' tokens.

    Args:
      outputs: The latest output of each of its prompts.
      hides_tokens: Whether the generated tokens weren't asked for and aren't shown.
    """
    num_prompt = num_generated = num_cached = 0
    for output in outputs:
        num_prompt += len(output.prompt_token_ids)
        num_cached += output.num_cached_tokens
        num_generated += 0 if hides_tokens else sum(len(sequence.token_ids) for sequence in output.outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def running_usage(num_prompt_tokens: int, num_generated_tokens: int) -> dict[str, int]:
    """Returns the usage so far that a stream's chunk may carry."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_generated_tokens,
        "total_tokens": num_prompt_tokens + num_generated_tokens,
    }


def _by_text(position: PositionLogprobs) -> dict[str, float]:
    """Returns text -> log probability; of two tokens with the same text the likelier one stays."""
    found: dict[str, float] = {}
    for entry in position.values():
        found[entry.decoded_token] = max(entry.logprob, found.get(entry.decoded_token, entry.logprob))
    return found


def _chat_entry(entry: Logprob) -> dict[str, Any]:
    token = entry.decoded_token
    return {"token": token, "logprob": entry.logprob, "bytes": list(token.encode("utf-8", "replace"))}
