"""StepNews: what one step brought, request by request, while it is being collected."""

import msgspec

from jaxllm.messages import EngineCoreOutput, SampledToken, SequenceOutput, TokenLogprobs
from jaxllm.sequence import Sequence, SequenceGroup

_NOTHING: list[TokenLogprobs] = []  # nobody writes to a message: one will do for all


class StepNews:
    def __init__(self) -> None:
        self._sequences: dict[str, tuple[SequenceGroup, list[SequenceOutput]]] = {}
        self._prompt_logprobs: dict[str, list[TokenLogprobs]] = {}

    def add_tokens(self, group: SequenceGroup, seq: Sequence, tokens: list[SampledToken]) -> None:
        output = SequenceOutput(seq.index, tokens, seq.status.finish_reason, seq.stop_reason)
        self._sequences_of(group).append(output)

    def add_hypotheses(self, group: SequenceGroup) -> None:
        """Adds the outcome of a beam search that is over."""
        best = group.hypotheses[: group.request.sampling_params.n]
        self._sequences_of(group).extend(
            msgspec.structs.replace(hypothesis.output, index=index) for index, hypothesis in enumerate(best)
        )

    def add_prompt_logprobs(self, group: SequenceGroup, logprobs: list[TokenLogprobs]) -> None:
        if logprobs:
            self._sequences_of(group)
            self._prompt_logprobs.setdefault(group.request_id, []).extend(logprobs)

    def to_outputs(self) -> list[EngineCoreOutput]:
        """Returns the news, the requests in the order of the batch."""
        return [
            EngineCoreOutput(
                request_id,
                sequences,
                self._prompt_logprobs.get(request_id, _NOTHING),
                group.num_cached_tokens,
                group.first_scheduled_time_s or 0.0,
                group.is_finished,
            )
            for request_id, (group, sequences) in self._sequences.items()
        ]

    def _sequences_of(self, group: SequenceGroup) -> list[SequenceOutput]:
        request_id = group.request_id
        entry = self._sequences.get(request_id)
        if entry is None:
            entry = self._sequences[request_id] = (group, [])
        return entry[1]


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
