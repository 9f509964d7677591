"""StepPlan: one step's work while it is being decided. Doesn't know why a sequence runs."""

from jaxllm.messages import CachedSequences, NewSequence, SchedulerOutput
from jaxllm.scheduler.kv_cache_manager import Allocation
from jaxllm.sequence import Sequence, SequenceGroup


class StepPlan:
    """Collects the scheduled sequences, in batch order, within a budget of tokens."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.token_budget = max_num_batched_tokens
        self.num_scheduled_tokens: dict[int, int] = {}
        self.blocks_to_copy: list[tuple[int, int]] = []
        self.blocks_to_swap_in: list[tuple[int, int]] = []
        self.blocks_to_swap_out: list[tuple[int, int]] = []
        self.num_partial_prefills = 0  # sequences that this step leaves unfinished
        self._new_seqs: list[NewSequence] = []
        self._num_samples: dict[int, int] = {}
        self._cached = CachedSequences([], [], [], [])

    def add(
        self,
        group: SequenceGroup,
        seq: Sequence,
        num_tokens: int,
        allocation: Allocation,
        block_ids: list[int] | None,
    ) -> None:
        """Schedules the sequence's next `num_tokens` tokens.

        Args:
          block_ids: Its whole block table, if the worker has no row for it; else None.
        """
        assert 0 < num_tokens <= self.token_budget
        self.token_budget -= num_tokens
        self.num_scheduled_tokens[seq.seq_id] = num_tokens
        is_last = seq.num_computed_tokens + num_tokens == seq.num_tokens
        self.num_partial_prefills += not is_last
        if group.n > 1 and not group.is_beam_search and not group.is_forked and is_last:
            self._num_samples[seq.seq_id] = group.n
        for block_idx, source, destination in allocation.replaced_blocks:
            self.blocks_to_copy.append((source, destination))
            if block_ids is None:
                self._cached.replaced_blocks.append((seq.seq_id, block_idx, destination))
        if block_ids is None:
            self._cached.seq_ids.append(seq.seq_id)
            self._cached.new_token_ids.append(seq.token_ids[seq.num_sent_tokens :])
            self._cached.new_block_ids.append(allocation.new_block_ids)
        else:
            self._new_seqs.append(_new_sequence(group, seq, block_ids))
            seq.is_on_worker = True
        seq.num_sent_tokens = seq.num_tokens

    def to_scheduler_output(self, step_id: int, dropped_seq_ids: list[int]) -> SchedulerOutput:
        assert not (self.blocks_to_swap_in and self.blocks_to_swap_out), "swapped in and out in one step"
        return SchedulerOutput(
            step_id=step_id,
            num_scheduled_tokens=self.num_scheduled_tokens,
            new_seqs=self._new_seqs,
            cached_seqs=self._cached,
            num_samples=self._num_samples,
            blocks_to_copy=self.blocks_to_copy,
            dropped_seq_ids=dropped_seq_ids,
            blocks_to_swap_in=self.blocks_to_swap_in,
            blocks_to_swap_out=self.blocks_to_swap_out,
        )


def _new_sequence(group: SequenceGroup, seq: Sequence, block_ids: list[int]) -> NewSequence:
    return NewSequence(
        seq_id=seq.seq_id,
        token_ids=list(seq.token_ids),
        num_prompt_tokens=seq.num_prompt_tokens,
        block_ids=block_ids,
        num_computed_tokens=seq.num_computed_tokens,
        seed=group.request.seed + seq.index,
        sampling_params=group.request.sampling_params,
        eos_token_ids=group.request.eos_token_ids if group.min_tokens else [],
        bad_words_token_ids=group.request.bad_words_token_ids,
    )
