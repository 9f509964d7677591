"""When a sequence ends by its tokens. Stop strings need text, which the front end has."""

from typing import NamedTuple

from jaxllm.sequence import Sequence, SequenceGroup, SequenceStatus


class Stop(NamedTuple):
    status: SequenceStatus
    stop_reason: int | None = None


def check_stop(group: SequenceGroup, seq: Sequence) -> SequenceStatus | None:
    """Returns the status with which the sequence's last token ends it, or None. Sets its stop_reason."""
    stop = find_stop(group, seq.token_ids[-1], seq.num_output_tokens)
    if stop is None:
        return None
    seq.stop_reason = stop.stop_reason
    return stop.status


def find_stop(group: SequenceGroup, token_id: int, num_output_tokens: int) -> Stop | None:
    """Returns how a sequence ends by its output token number `num_output_tokens`, counted from 1, or None.

    The rules apply in this order, so that an end-of-sequence on the last allowed token is a stop, not a
    length. Before token number min_tokens no token ends anything.
    """
    if num_output_tokens >= group.min_tokens:
        if token_id in group.eos_token_ids:
            return Stop(SequenceStatus.FINISHED_STOPPED)
        if token_id in group.stop_token_ids:
            return Stop(SequenceStatus.FINISHED_STOPPED, token_id)
    if num_output_tokens >= group.max_num_output_tokens:
        return Stop(SequenceStatus.FINISHED_LENGTH_CAPPED)
    return None
