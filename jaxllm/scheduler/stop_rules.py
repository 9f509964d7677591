"""When a sequence ends by its tokens. Stop strings need text, which the front end has."""

from jaxllm.sequence import Sequence, SequenceGroup, SequenceStatus


def check_stop(group: SequenceGroup, seq: Sequence, max_model_len: int) -> SequenceStatus | None:
    """Returns the status with which the sequence's last token ends it, or None. Sets its stop_reason.

    The rules apply in this order, so that an end-of-sequence on the last allowed token is a stop, not a
    length.
    """
    last = seq.token_ids[-1]
    if last in group.eos_token_ids:
        return SequenceStatus.FINISHED_STOPPED
    if last in group.stop_token_ids:
        seq.stop_reason = last
        return SequenceStatus.FINISHED_STOPPED
    if seq.num_output_tokens >= group.request.max_tokens or seq.num_tokens >= max_model_len:
        return SequenceStatus.FINISHED_LENGTH_CAPPED
    return None
