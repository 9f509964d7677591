"""StepBuilder: chooses a step's sequences and how many tokens of each. Takes in no results.

With chunked prefill a step holds prompt chunks and single decode tokens side by side, within one budget of
tokens: running sequences first, then swapped ones, then waiting ones, as long as blocks, seats (max_num_seqs)
and budget last. Without it a step holds either whole prompts or decode tokens, and prompts come first.

Both walk the queues in the policy's order, and whoever must give up blocks stands last in it: a victim is
never part of the step already.
"""

from jaxllm.config import SchedulerConfig
from jaxllm.scheduler.admission import num_watermark_blocks
from jaxllm.scheduler.kv_cache_manager import Allocation, KVCacheManager
from jaxllm.scheduler.preemption import Preemption
from jaxllm.scheduler.prompt_delay import PromptDelay
from jaxllm.scheduler.request_queue import Queues
from jaxllm.scheduler.step_plan import StepPlan
from jaxllm.sequence import Sequence, SequenceGroup, SequenceStatus

_RUNNING = SequenceStatus.RUNNING  # reached through its class it would cost more than the comparisons below


class StepBuilder:
    """Works on the scheduler's queues and block tables.

    Args:
      config: The policies.
      max_num_seqs: Seats of a step.
      queues: Who waits and who runs.
      kv_cache_manager: Their blocks.
      preemption: Takes blocks back.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        max_num_seqs: int,
        queues: Queues,
        kv_cache_manager: KVCacheManager,
        preemption: Preemption,
    ) -> None:
        self._config = config
        self._max_num_seqs = max_num_seqs
        self._queues = queues
        self._kv = kv_cache_manager
        self._preemption = preemption
        self._num_watermark_blocks = num_watermark_blocks(config, kv_cache_manager.block_pool.num_usable_blocks)
        self.prompt_delay = PromptDelay(config.scheduler_delay_factor)

    def build(self, plan: StepPlan, now_s: float) -> None:
        """Fills an empty plan. It holds work whenever there are unfinished requests."""
        self._fill(plan, now_s)
        self._free_idle_beams(plan, now_s)

    def _fill(self, plan: StepPlan, now_s: float) -> None:
        queues = self._queues
        arrivals = (
            [group.request.arrival_time_s for group in queues.waiting] if self._config.scheduler_delay_factor else []
        )
        takes_prompts = self.prompt_delay.passed(now_s, arrivals, len(queues.running) > 0)
        if not self._config.enable_chunked_prefill:
            if self._admit_displaced(plan) and takes_prompts and not queues.swapped:
                self._admit_waiting(plan, now_s)
            if plan.num_scheduled_tokens:
                return
        num_preemptions = self._preemption.num_preemptions
        self._schedule_running(plan)
        if self._preemption.num_preemptions > num_preemptions:
            return  # who came in now would be the next to be preempted
        if self._config.enable_chunked_prefill and not self._admit_displaced(plan):
            return
        self._swap_in(plan)
        if self._config.enable_chunked_prefill and takes_prompts and not queues.swapped:
            if self._preemption.num_preemptions == num_preemptions:
                self._admit_waiting(plan, now_s)

    def _schedule_running(self, plan: StepPlan) -> None:
        num_preemptions = self._preemption.num_preemptions
        for group in list(self._queues.running):
            if not plan.token_budget:
                return
            if self._preemption.num_preemptions > num_preemptions and group not in self._queues.running:
                return  # preempted, and so is everybody behind it
            self._schedule_group(plan, group)

    def _free_idle_beams(self, plan: StepPlan, now_s: float) -> None:
        """Makes room when all blocks are held by beams that wait for siblings which find none."""
        while self._queues.running and not plan.num_scheduled_tokens:
            self._preemption.recompute(self._queues.running.last())
            self._admit_waiting(plan, now_s)

    def _schedule_group(self, plan: StepPlan, group: SequenceGroup) -> None:
        may_be_short = self._kv.block_pool.num_free_blocks < len(group.seqs)  # a sequence takes one block at most
        if may_be_short and self._preemption.may_swap(group) and not self._make_room(plan, group):
            return
        for seq in group.seqs:
            if not plan.token_budget:
                return
            if seq.status is not _RUNNING or seq.candidates is not None:
                continue
            num_tokens = self._num_tokens(plan, seq.num_tokens - seq.num_computed_tokens)
            allocation = self._allocate_or_preempt(plan, group, seq, num_tokens)
            if allocation is None:
                return  # this one was preempted; so are its younger siblings
            self._add_to_plan(plan, group, seq, num_tokens, allocation)

    def _make_room(self, plan: StepPlan, group: SequenceGroup) -> bool:
        """Preempts from the end of the queue until all of the group finds blocks: it is swapped whole or not at all.

        Returns False if the group had to go itself. Where nobody before it runs it mustn't, since it would find no
        more room later: then its younger sequences make room for the elder ones.
        """
        wanted = [
            (seq, self._num_tokens(plan, seq.num_tokens - seq.num_computed_tokens))
            for seq in group.seqs_with(SequenceStatus.RUNNING)
            if seq.candidates is None
        ]
        num_needed = self._kv.num_blocks_needed(wanted)
        while num_needed > self._kv.block_pool.num_free_blocks:
            newest = self._queues.running.last()
            if newest is not group:
                self._preemption.preempt(plan, newest)
            else:
                return not (plan.num_scheduled_tokens and self._preemption.swap_out(plan, group))
        return True

    def _allocate_or_preempt(
        self, plan: StepPlan, group: SequenceGroup, seq: Sequence, num_tokens: int
    ) -> Allocation | None:
        """Returns None if the sequence had to be preempted itself."""
        while seq.status is _RUNNING:
            allocation = self._kv.allocate_slots(seq, num_tokens)
            if allocation is not None:
                return allocation
            newest = self._queues.running.last()
            if newest is group:  # elder siblings are in this step already: give way from the youngest up
                self._preemption.displace_youngest(group)
            else:
                self._preemption.preempt(plan, newest)
        return None

    def _swap_in(self, plan: StepPlan) -> None:
        """Brings swapped groups back, in order. Each finds room for its next tokens too."""
        swapped = self._queues.swapped
        while swapped and plan.token_budget:
            group = swapped.first()
            if self._queues.num_seats_taken() + group.get_max_num_running_seqs() > self._max_num_seqs:
                return
            seqs = group.seqs_with(SequenceStatus.SWAPPED)
            # Alone it gets in whatever its next tokens need: its younger sequences can make room.
            num_reserved = self._num_watermark_blocks + len(seqs) if self._kv.req_to_blocks else 0
            pairs = self._kv.swap_in([seq.seq_id for seq in seqs], num_reserved)
            if pairs is None:
                return
            plan.blocks_to_swap_in += pairs
            for seq in seqs:
                seq.status = SequenceStatus.RUNNING
            self._queues.move(group, self._queues.running)
            self._schedule_group(plan, group)

    def _admit_displaced(self, plan: StepPlan) -> bool:
        """Admits the siblings that made room for elder ones. Returns False when one of them has to wait on."""
        return all(
            self._admit_all(plan, group)
            for group in self._queues.running
            if len(group.seqs) > 1 or group.is_beam_search
        )

    def _admit_waiting(self, plan: StepPlan, now_s: float) -> None:
        """Takes in the waiting, in order: the head of the queue is never overtaken."""
        waiting = self._queues.waiting
        if not waiting:
            return
        num_free_seats = self._max_num_seqs - self._queues.num_seats_taken()
        while waiting and plan.token_budget:
            group = waiting.first()
            num_free_seats -= group.get_max_num_running_seqs()
            if num_free_seats < 0:
                return
            is_complete = self._admit_all(plan, group)
            if group.seqs_with(SequenceStatus.RUNNING):
                self._queues.move(group, self._queues.running)
                self.prompt_delay.prev_prompt = True
                if group.first_scheduled_time_s is None:
                    group.first_scheduled_time_s = now_s
            if not is_complete:
                return

    def _admit_all(self, plan: StepPlan, group: SequenceGroup) -> bool:
        """Admits the group's sequences without blocks. Returns False when one of them has to wait on."""
        return all(
            plan.token_budget > 0 and self._admit(plan, group, seq)
            for seq in group.seqs_with(SequenceStatus.WAITING)
            if seq.candidates is None
        )

    def _admit(self, plan: StepPlan, group: SequenceGroup, seq: Sequence) -> bool:
        """Starts a sequence that holds no blocks. Returns False, with nothing changed, when room is short.

        It gets the blocks of all its tokens, even if the budget lets it compute only some now: a prompt that
        is half computed when blocks run out would be computed twice.
        """
        kv = self._kv
        hits = [] if group.has_due_prompt_logprobs else kv.get_computed_blocks(seq)
        num_hit_tokens = len(hits) * kv.block_size
        num_left = seq.num_tokens - num_hit_tokens
        num_tokens = self._num_tokens(plan, num_left)
        if num_tokens < num_left and not self._may_leave_unfinished(plan):
            return False
        allocation = kv.allocate_slots(seq, num_left, hits, self._num_reserved_blocks())
        if allocation is None:
            return False
        if not seq.num_preemptions:
            group.num_cached_tokens = num_hit_tokens
            if not group.has_due_prompt_logprobs:
                kv.record_lookup(seq.num_tokens, num_hit_tokens)
        seq.status = SequenceStatus.RUNNING
        seq.num_computed_tokens = num_hit_tokens
        self._add_to_plan(plan, group, seq, num_tokens, allocation)
        return True

    def _num_tokens(self, plan: StepPlan, num_left: int) -> int:
        """Returns how many of a sequence's `num_left` tokens this step computes."""
        return min(num_left, plan.token_budget, self._config.long_prefill_token_threshold or num_left)

    def _may_leave_unfinished(self, plan: StepPlan) -> bool:
        config = self._config
        return config.enable_chunked_prefill and plan.num_partial_prefills < config.max_num_partial_prefills

    def _num_reserved_blocks(self) -> int:
        """Returns how many free blocks somebody who comes in must leave: none if nobody else has any."""
        return self._num_watermark_blocks if self._kv.req_to_blocks else 0

    def _add_to_plan(
        self, plan: StepPlan, group: SequenceGroup, seq: Sequence, num_tokens: int, allocation: Allocation
    ) -> None:
        block_ids = None if seq.is_on_worker else self._kv.block_ids(seq.seq_id)
        plan.add(group, seq, num_tokens, allocation, block_ids)
