"""What a caller holds in the end: RequestOutput, CompletionOutput, Logprob. Names are vLLM's."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """One token's log probability at one position, under the model's raw logits (before temperature)."""

    logprob: float
    rank: int  # 1 is the most likely token
    decoded_token: str


# One position: token id -> Logprob. The token that stands there is always among the keys.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True, eq=False)
class CompletionOutput:
    """One generated sequence.

    Attributes:
      index: Which of the request's n sequences this is.
      text: The generated text so far, without what the stop rules hide.
      token_ids: Every generated token, the stop token included.
      cumulative_logprob: Sum of the sampled tokens' log probabilities, or None if they weren't asked for
        and no beam search counted them.
      logprobs: One PositionLogprobs a generated token, or None if they weren't asked for.
      finish_reason: "stop", "length", "abort", or None while the sequence runs.
      stop_reason: The stop string or stop token id that ended it; None for end-of-sequence and for length.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True, eq=False)
class BeamSearchSequence:
    """One outcome of a beam search.

    Attributes:
      tokens: Prompt and generated tokens, without the end-of-sequence token.
      cum_logprob: Sum of the generated tokens' log probabilities, that of an end-of-sequence token included.
      text: All of `tokens` as text.
      finish_reason: "stop" or "length".
    """

    tokens: list[int]
    cum_logprob: float
    text: str
    finish_reason: str | None


@dataclass(slots=True, eq=False)
class BeamSearchOutput:
    """The best sequences that a beam search found for one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True, eq=False)
class RequestMetrics:
    """Times of one request in seconds of the monotonic clock; None while the moment hasn't come.

    Attributes:
      arrival_time_s: When the request was added.
      first_scheduled_time_s: When its first prompt token was given to the model.
      first_token_time_s: When its first generated token arrived.
      finished_time_s: When its last sequence finished.
      num_cached_tokens: Prompt tokens whose keys and values came from the prefix cache.
    """

    arrival_time_s: float
    first_scheduled_time_s: float | None = None
    first_token_time_s: float | None = None
    finished_time_s: float | None = None
    num_cached_tokens: int = 0


@dataclass(slots=True, eq=False)
class RequestOutput:
    """A request's prompt and its sequences, complete if `finished`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics

    @property
    def num_cached_tokens(self) -> int:
        return self.metrics.num_cached_tokens
