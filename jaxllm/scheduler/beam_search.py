"""Beam search: which beams of a group go on, which have ended, and whether the search is over. Pure functions.

The rules are those of transformers. All live beams have generated equally many tokens. Of their candidates, the most
likely first, those that end become hypotheses if they stand among the first `width`; the first `width` that don't end
go on. Knows no block and no queue: the scheduler forks and frees.
"""

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

from jaxllm.messages import BeamCandidates, SampledToken, SequenceOutput, TokenLogprobs
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.stop_rules import Stop, find_stop
from jaxllm.sequence import Hypothesis, Sequence, SequenceGroup

LOWEST_LOGPROB = -9999.0  # stands for -inf and NaN, which sums and quotients would spread


class Candidate(NamedTuple):
    """A live beam and one more token."""

    beam: int  # position among the live beams
    position: int  # among that beam's candidates
    token_id: int
    cumulative_logprob: float  # with this token


class BeamStep(NamedTuple):
    """What one step of the search decides.

    Attributes:
      kept: What goes on, best first. Empty when the search is over.
      hypotheses: The best that have ended so far, best first, at most `width`.
    """

    kept: list[Candidate]
    hypotheses: list[Hypothesis]


def step_beams(group: SequenceGroup) -> BeamStep:
    """Decides one step of a group whose live beams all have their candidates. Changes nothing."""
    params = group.request.sampling_params
    num_output_tokens = group.seqs[0].num_output_tokens + 1
    hypotheses, kept = list(group.hypotheses), []
    for rank, candidate in enumerate(rank_candidates(group.seqs)):
        stop = find_stop(group, candidate.token_id, num_output_tokens)
        if stop is None:
            kept.append(candidate)
            if len(kept) == params.beam_width:
                break
        elif rank < params.beam_width:
            hypotheses.append(_hypothesis(group.seqs[candidate.beam], candidate, stop, params))
    hypotheses.sort(key=lambda hypothesis: hypothesis.score, reverse=True)
    del hypotheses[params.beam_width :]
    if kept:
        best, longest = kept[0].cumulative_logprob, group.max_num_output_tokens
        if is_over(params, [entry.score for entry in hypotheses], best, num_output_tokens, longest):
            kept = []
    return BeamStep(kept, hypotheses)


def rank_candidates(beams: Seq[Sequence]) -> list[Candidate]:
    """Returns every beam's candidates, the most likely first; of equals, the better beam's comes first."""
    candidates = []
    for index, beam in enumerate(beams):
        assert beam.candidates is not None
        pairs = zip(beam.candidates.token_ids, beam.candidates.logprobs, strict=True)
        for position, (token_id, logprob) in enumerate(pairs):
            cumulative = beam.cumulative_logprob + _finite(logprob)
            candidates.append(Candidate(index, position, token_id, cumulative))
    return sorted(candidates, key=lambda candidate: candidate.cumulative_logprob, reverse=True)


def score(cumulative_logprob: float, num_output_tokens: int, length_penalty: float) -> float:
    """Returns what sequences of different lengths are compared by. Only generated tokens count as length."""
    return cumulative_logprob / math.pow(num_output_tokens, length_penalty)


def is_over(
    params: SamplingParams,
    hypothesis_scores: Seq[float],
    best_cumulative_logprob: float,
    num_output_tokens: int,
    max_num_tokens: int,
) -> bool:
    """Returns whether the search ends although beams could go on.

    Args:
      params: The request's.
      hypothesis_scores: Of what has ended, best first.
      best_cumulative_logprob: The most likely live beam's.
      num_output_tokens: Tokens that the live beams have generated.
      max_num_tokens: Tokens that they may generate.
    """
    if len(hypothesis_scores) < params.beam_width:
        return False
    if params.early_stopping is True:
        return True
    length = num_output_tokens
    if params.early_stopping == "never" and params.length_penalty > 0:
        length = max_num_tokens  # a sum of log probabilities is negative: there it is divided by most
    return score(best_cumulative_logprob, length, params.length_penalty) <= hypothesis_scores[-1]


def token_logprobs(candidates: BeamCandidates, position: int, num_top: int) -> TokenLogprobs:
    """Returns the log probabilities to report when a beam goes on with its candidate at `position`."""
    logprob = candidates.logprobs[position]
    rank = 1 + sum(other > logprob for other in candidates.logprobs)
    return TokenLogprobs(logprob, rank, candidates.token_ids[:num_top], candidates.logprobs[:num_top])


def extend_beam(beam: Sequence, candidate: Candidate, candidates: BeamCandidates, num_logprobs: int | None) -> None:
    """Appends one of its parent's candidates to a beam."""
    beam.append_token_id(candidate.token_id)
    beam.cumulative_logprob = candidate.cumulative_logprob
    beam.candidates = None
    if num_logprobs is not None:
        beam.output_logprobs.append(token_logprobs(candidates, candidate.position, num_logprobs))


def _hypothesis(beam: Sequence, candidate: Candidate, stop: Stop, params: SamplingParams) -> Hypothesis:
    token_ids = [*beam.token_ids[beam.num_prompt_tokens :], candidate.token_id]
    logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
    if params.logprobs is not None:
        assert beam.candidates is not None
        logprobs = [*beam.output_logprobs, token_logprobs(beam.candidates, candidate.position, params.logprobs)]
    output = SequenceOutput(
        0,
        [SampledToken(token_id, entry) for token_id, entry in zip(token_ids, logprobs, strict=True)],
        stop.status.finish_reason,
        stop.stop_reason,
        candidate.cumulative_logprob,
    )
    return Hypothesis(score(candidate.cumulative_logprob, len(token_ids), params.length_penalty), output)


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
