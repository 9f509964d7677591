"""Sequence, SequenceStatus, SequenceGroup: the host's state of one request. Knows no policy, no physical
block.

A group is one request: one prompt and 1..n sequences. Sequence 0 computes the prompt alone; the others are
forked from it when the prompt is complete, so that its blocks are computed once and shared.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from jaxllm.messages import BeamCandidates, EngineCoreRequest, SequenceOutput, TokenLogprobs


class SequenceStatus(IntEnum):
    """Where a sequence stands. The finished states come last, so that one comparison tells them apart."""

    WAITING = 0  # holds no blocks: new, or preempted
    RUNNING = 1
    SWAPPED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_IGNORED = 5
    FINISHED_ABORTED = 6

    @property
    def is_finished(self) -> bool:
        return self > SequenceStatus.SWAPPED

    @property
    def finish_reason(self) -> str | None:
        """The reason as users read it, or None while the sequence lives."""
        return _FINISH_REASONS[self]


_FINISH_REASONS = (None, None, None, "stop", "length", "length", "abort")  # in the order of the statuses
_LAST_UNFINISHED = SequenceStatus.SWAPPED  # reached through its class, a member costs Python 3.11 more than the rest


class Sequence:
    """One line of tokens, prompt and output together.

    Attributes:
      seq_id: Unique in the life of the scheduler; the worker knows the sequence by it.
      index: Which of the request's n sequences this is.
      token_ids: Prompt, then output.
      logical_token_blocks: The same tokens cut into blocks; all full but perhaps the last.
        A full one never changes.
      num_computed_tokens: Tokens from the start whose keys and values stand in its physical blocks.
      num_sent_tokens: Tokens that the worker has been told.
      is_on_worker: Whether the worker has a row for it.
      num_preemptions: How often it lost its blocks.
      stop_reason: The stop token id that ended it, or None.
      cumulative_logprob: Sum of its output tokens' log probabilities. Counted in beam search only.
      output_logprobs: One entry an output token. Filled in beam search only, if log probabilities were asked for.
      candidates: Its possible next tokens, while a beam waits for the other beams of its group to have theirs.
      cache_keys: (tag, value) pairs that part its prefix from equal tokens under other keys, such as a salt.
    """

    __slots__ = (
        "seq_id",
        "request_id",
        "index",
        "block_size",
        "token_ids",
        "num_prompt_tokens",
        "logical_token_blocks",
        "status",
        "num_computed_tokens",
        "num_sent_tokens",
        "is_on_worker",
        "num_preemptions",
        "stop_reason",
        "cache_keys",
        "cumulative_logprob",
        "output_logprobs",
        "candidates",
    )

    def __init__(
        self, seq_id: int, request_id: str, index: int, prompt_token_ids: Iterable[int], block_size: int
    ) -> None:
        self.seq_id = seq_id
        self.request_id = request_id
        self.index = index
        self.block_size = block_size
        self.token_ids: list[int] = []
        self.logical_token_blocks: list[list[int]] = []
        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = 0
        self.num_sent_tokens = 0
        self.is_on_worker = False
        self.num_preemptions = 0
        self.stop_reason: int | None = None
        self.cache_keys: tuple[tuple[str, str], ...] = ()
        self.cumulative_logprob = 0.0
        self.output_logprobs: list[TokenLogprobs] = []
        self.candidates: BeamCandidates | None = None
        self._append_tokens_to_blocks(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status > _LAST_UNFINISHED

    def append_token_id(self, token_id: int) -> None:
        self._append_tokens_to_blocks((token_id,))

    def fork(self, seq_id: int, index: int) -> "Sequence":
        """Returns a sequence with the same tokens and the same computed length, unknown to the worker."""
        child = Sequence(seq_id, self.request_id, index, (), self.block_size)
        child.token_ids = list(self.token_ids)
        child.num_prompt_tokens = self.num_prompt_tokens
        child.logical_token_blocks = list(self.logical_token_blocks)  # full blocks never change: share them
        if child.logical_token_blocks:
            child.logical_token_blocks[-1] = list(child.logical_token_blocks[-1])
        child.status = self.status
        child.cache_keys = self.cache_keys
        child.num_computed_tokens = self.num_computed_tokens
        child.cumulative_logprob = self.cumulative_logprob
        child.output_logprobs = list(self.output_logprobs)
        return child

    def _append_tokens_to_blocks(self, token_ids: Iterable[int]) -> None:
        blocks = self.logical_token_blocks
        for token_id in token_ids:
            if not blocks or len(blocks[-1]) == self.block_size:
                blocks.append([])
            blocks[-1].append(token_id)
            self.token_ids.append(token_id)


class Hypothesis(NamedTuple):
    """A beam that has ended."""

    score: float
    output: SequenceOutput  # whole; its index is set when the search ends


class SequenceGroup:
    """One request and its sequences.

    Attributes:
      n: How many sequences the request wants.
      is_beam_search: Whether they are found by beam search.
      seqs: By index. Only sequence 0 until the prompt is complete, then all n; in beam search the live beams, best
        first.
      hypotheses: The best beams that have ended, best first. Beam search only.
      min_tokens: How many tokens each of its sequences generates before a token may end it.
      max_num_output_tokens: How many tokens each of its sequences may generate.
      first_scheduled_time_s: When its first token was scheduled, or None.
      num_cached_tokens: Prompt tokens that the prefix cache held when the request was first scheduled.
      num_prompt_logprobs: Prompt positions, counted from position 1, whose logprobs have been handed out.
      queue_key: Its place in every queue; see scheduler/policy.py.
    """

    __slots__ = (
        "request",
        "request_id",
        "n",
        "is_beam_search",
        "seqs",
        "hypotheses",
        "eos_token_ids",
        "stop_token_ids",
        "min_tokens",
        "max_num_output_tokens",
        "first_scheduled_time_s",
        "num_cached_tokens",
        "num_prompt_logprobs",
        "queue_key",
    )

    def __init__(self, request: EngineCoreRequest, first: Sequence, max_model_len: int) -> None:
        params = request.sampling_params
        self.request = request
        self.request_id = request.request_id
        self.n = params.n
        self.is_beam_search = params.use_beam_search
        self.seqs = [first]
        self.hypotheses: list[Hypothesis] = []
        self.eos_token_ids = frozenset(() if params.ignore_eos else request.eos_token_ids)
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.min_tokens = params.min_tokens
        self.max_num_output_tokens = min(request.max_tokens, max_model_len - len(request.prompt_token_ids))
        self.first_scheduled_time_s: float | None = None
        self.num_cached_tokens = 0
        self.num_prompt_logprobs = 0
        self.queue_key = (0, 0.0, first.seq_id)

    @property
    def is_forked(self) -> bool:
        return len(self.seqs) == self.n

    @property
    def is_finished(self) -> bool:
        for seq in self.seqs:  # asked once a step, and nearly always answered by the first
            if seq.status <= _LAST_UNFINISHED:
                return False
        return True

    @property
    def has_due_prompt_logprobs(self) -> bool:
        """Whether prompt positions remain to be scored. That needs them computed, not found in the cache."""
        if self.request.sampling_params.prompt_logprobs is None:
            return False
        return self.num_prompt_logprobs < len(self.request.prompt_token_ids) - 1

    def seqs_with(self, status: SequenceStatus) -> list[Sequence]:
        return [seq for seq in self.seqs if seq.status is status]

    def unfinished_seqs(self) -> list[Sequence]:
        return [seq for seq in self.seqs if seq.status <= _LAST_UNFINISHED]

    def get_max_num_running_seqs(self) -> int:
        """Returns how many sequences may run at once: n until the prompt is forked, then those that live.

        A beam search may always grow back to its width.
        """
        if self.is_beam_search:
            return self.request.sampling_params.beam_width
        return len(self.unfinished_seqs()) if self.is_forked else self.n
