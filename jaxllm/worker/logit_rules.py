"""LogitRules: what one sequence's parameters do to single logits before a draw, from its tokens so far.

The host finds which logits change and by how much; layers/sampler.py changes them. All that depends on tokens is
counted from the tokens themselves, so that a sequence that comes back from preemption goes on as if it had never left.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.messages import NewSequence
from jaxllm.sampling_params import SamplingParams


class Adjustments(NamedTuple):
    """The logits that change; no token stands here twice. Their order: add, then divide, then subtract."""

    token_ids: np.ndarray  # [C] int32
    biases: np.ndarray  # [C] float32, -inf for a token that must not come
    divisors: np.ndarray  # [C] float32; a logit that isn't positive is multiplied instead
    penalties: np.ndarray  # [C] float32
    is_restricted: bool  # no other token may come


class LogitRules:
    """The rules of one sequence. Made by `rules_for`, asked once a draw.

    Args:
      sequence: As the worker hears of it: new, or with what it has generated.
      max_model_len: Most tokens that it can have.
    """

    def __init__(self, sequence: NewSequence, max_model_len: int) -> None:
        params = sequence.sampling_params
        self._num_prompt_tokens = self._num_counted = sequence.num_prompt_tokens
        self._min_tokens = params.min_tokens
        self._ending_ids = {*sequence.eos_token_ids, *(params.stop_token_ids or ())} if params.min_tokens else set()
        self._bad_words = sequence.bad_words_token_ids
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        self._repetition = params.repetition_penalty
        self._is_restricted = params.allowed_token_ids is not None
        fixed = self._fixed_ids(params)
        self._has_penalties = _has_penalties(params)
        self._is_lasting = self._is_restricted or bool(params.logit_bias) or self._has_penalties
        capacity = len(fixed) + (max_model_len if self._has_penalties and not self._is_restricted else 0)
        self._slots = {token_id: slot for slot, token_id in enumerate(fixed)}
        self._token_ids = np.zeros(capacity, np.int32)
        self._token_ids[: len(fixed)] = fixed
        self._biases = np.zeros(capacity, np.float32)
        self._divisors = np.ones(capacity, np.float32)
        self._counts = np.zeros(capacity, np.float32)  # among the generated tokens
        for token_id, value in (params.logit_bias or {}).items():
            if token_id in self._slots:
                self._biases[self._slots[token_id]] = value
        if self._repetition != 1:
            for token_id in dict.fromkeys(sequence.token_ids[: sequence.num_prompt_tokens]):
                self._see(token_id)

    def adjustments(self, tokens: np.ndarray) -> Adjustments | None:
        """Returns what changes for the draw after `tokens`: [n] int32, prompt and generated; None for nothing."""
        if self._has_penalties:
            for token_id in tokens[self._num_counted :].tolist():
                slot = self._see(token_id)
                if slot is not None:
                    self._counts[slot] += 1
            self._num_counted = len(tokens)
        output = tokens[self._num_prompt_tokens :]
        ending = self._ending_ids if len(output) < self._min_tokens else set()
        masked = self._masked_slots(ending, output)
        if not masked and not self._is_lasting:
            return None
        num = len(self._slots)
        biases, counts = self._biases[:num], self._counts[:num]
        if masked:
            biases = biases.copy()
            biases[masked] = -math.inf
        penalties = self._presence * (counts > 0) + self._frequency * counts
        return Adjustments(
            self._token_ids[:num], biases, self._divisors[:num], penalties.astype(np.float32), self._is_restricted
        )

    def _fixed_ids(self, params: SamplingParams) -> list[int]:
        """Returns the tokens that may change from the beginning on; where others are out, those that aren't."""
        if params.allowed_token_ids is not None:
            return list(dict.fromkeys(params.allowed_token_ids))
        last_ids = (word[-1] for word in self._bad_words)
        return list(dict.fromkeys([*(params.logit_bias or ()), *sorted(self._ending_ids), *last_ids]))

    def _see(self, token_id: int) -> int | None:
        """Takes note that a token has come; returns its slot, None where it may not come again anyway."""
        slot = self._slots.get(token_id)
        if slot is None:
            if self._is_restricted:
                return None
            slot = self._slots[token_id] = len(self._slots)
            self._token_ids[slot] = token_id
        self._divisors[slot] = self._repetition
        return slot

    def _masked_slots(self, ending: set[int], output: np.ndarray) -> list[int]:
        """Returns the slots of the tokens that must not come now. Bad words give way where nothing else is left."""
        bad = {word[-1] for word in self._bad_words if _ends_with(output, word[:-1])}
        if self._is_restricted and self._slots.keys() <= ending | bad:
            bad = set()
        return [self._slots[token_id] for token_id in ending | bad if token_id in self._slots]


def rules_for(sequence: NewSequence, max_model_len: int) -> LogitRules | None:
    """Returns a sequence's rules; None for most, which have none."""
    params = sequence.sampling_params
    has_rules = (
        params.logit_bias
        or params.allowed_token_ids is not None
        or params.min_tokens
        or sequence.bad_words_token_ids
        or _has_penalties(params)
    )
    return LogitRules(sequence, max_model_len) if has_rules else None


def _has_penalties(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty) or params.repetition_penalty != 1


def _ends_with(output: np.ndarray, tail: Sequence[int]) -> bool:
    return not tail or len(tail) <= len(output) and output[-len(tail) :].tolist() == list(tail)
