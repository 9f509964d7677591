"""StepNews: what one step brought, request by request, while it is being collected."""

import msgspec

from jaxllm.messages import EngineCoreOutput, SampledToken, SequenceOutput, TokenLogprobs
from jaxllm.sequence import Sequence, SequenceGroup


class StepNews:
    def __init__(self) -> None:
        self._groups: dict[str, SequenceGroup] = {}
        self._sequences: dict[str, list[SequenceOutput]] = {}
        self._prompt_logprobs: dict[str, list[TokenLogprobs]] = {}

    def add_token(self, group: SequenceGroup, seq: Sequence, token: SampledToken) -> None:
        self._groups[seq.request_id] = group
        output = SequenceOutput(seq.index, [token], seq.status.finish_reason, seq.stop_reason)
        self._sequences.setdefault(seq.request_id, []).append(output)

    def add_hypotheses(self, group: SequenceGroup) -> None:
        """Adds the outcome of a beam search that is over."""
        best = group.hypotheses[: group.request.sampling_params.n]
        self._groups[group.request_id] = group
        self._sequences[group.request_id] = [
            msgspec.structs.replace(hypothesis.output, index=index) for index, hypothesis in enumerate(best)
        ]

    def add_prompt_logprobs(self, group: SequenceGroup, logprobs: list[TokenLogprobs]) -> None:
        if logprobs:
            self._groups[group.request_id] = group
            self._prompt_logprobs.setdefault(group.request_id, []).extend(logprobs)

    def to_outputs(self) -> list[EngineCoreOutput]:
        """Returns the news, the requests in the order of the batch."""
        return [
            EngineCoreOutput(
                request_id,
                self._sequences.get(request_id, []),
                self._prompt_logprobs.get(request_id, []),
                group.num_cached_tokens,
                group.first_scheduled_time_s or 0.0,
                group.is_finished,
            )
            for request_id, group in self._groups.items()
        ]


def due_prompt_logprobs(
    group: SequenceGroup, num_computed_tokens: int, scored: list[TokenLogprobs]
) -> list[TokenLogprobs]:
    """Returns those of a step's prompt logprobs that haven't been handed out, and counts them as handed out.

    A step that starts after c computed tokens scores positions c+1, c+2, ...; after a preemption it scores
    positions again that the caller already has.
    """
    num_known = group.num_prompt_logprobs - num_computed_tokens
    assert num_known >= 0, "a prompt position was never scored"
    due = scored[num_known:]
    group.num_prompt_logprobs += len(due)
    return due
