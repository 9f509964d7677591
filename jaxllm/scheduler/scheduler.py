"""Scheduler: decides each step's work and takes in its results. Knows no text, no device and no process.

A step holds prompt chunks and single decode tokens side by side, within one budget of tokens. Running
sequences come first, in order of arrival; then waiting ones, as long as blocks, seats (max_num_seqs) and
budget last. The head of the queue is never overtaken. The beams of a beam search go forward together: one that has
its candidates already waits for the others. When a running sequence finds no free block, the newest
group gives up its blocks and goes back to the front of the queue, to be computed again from its tokens
(preemption by recomputation).
"""

from jaxllm.config import CacheConfig, SchedulerConfig
from jaxllm.exceptions import InvalidRequestError
from jaxllm.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    KVCacheInfo,
    ModelRunnerOutput,
    SampledToken,
    SchedulerOutput,
    SchedulerStats,
)
from jaxllm.scheduler.admission import check_request
from jaxllm.scheduler.beam_search import Candidate, extend_beam, step_beams
from jaxllm.scheduler.kv_cache_manager import Allocation, KVCacheManager
from jaxllm.scheduler.request_queue import RequestQueue
from jaxllm.scheduler.step_news import StepNews, due_prompt_logprobs
from jaxllm.scheduler.step_plan import StepPlan
from jaxllm.scheduler.stop_rules import check_stop
from jaxllm.sequence import Sequence, SequenceGroup, SequenceStatus


class Scheduler:
    """Call schedule() and update_from_output() in turn; requests may come and go between any two calls.

    A group stands in exactly one of the queues; in `waiting` none of its sequences holds blocks. A sequence
    that made room for its own elder siblings is WAITING inside a running group; it comes before everybody who
    waits. A beam that has its candidates is never computed again: it waits in its state, with or without blocks.
    """

    def __init__(self, config: SchedulerConfig, cache_config: CacheConfig, kv_info: KVCacheInfo) -> None:
        self.max_num_seqs = min(config.max_num_seqs, kv_info.max_num_seqs)
        self.max_num_batched_tokens = min(config.max_num_batched_tokens, kv_info.max_num_batched_tokens)
        self.max_model_len = config.max_model_len
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.kv_cache_manager = KVCacheManager(
            kv_info.num_device_blocks, kv_info.block_size, cache_config.enable_prefix_caching
        )
        self._groups: dict[str, SequenceGroup] = {}
        self._seqs: dict[int, Sequence] = {}  # the unfinished ones
        self._num_seqs_made = 0
        self._dropped_seq_ids: list[int] = []  # to be told to the worker with the next step
        self._step_id = 0
        self._num_preemptions = 0
        self._num_copied_blocks = 0

    def add_request(self, request: EngineCoreRequest) -> None:
        """Puts a request at the end of the queue.

        Raises:
          InvalidRequestError: It could never run, or a live request has its id. Nothing has changed.
        """
        if request.request_id in self._groups:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use by a request that still runs")
        kv = self.kv_cache_manager
        check_request(request, self.max_num_seqs, self.max_model_len, kv.block_size, kv.block_pool.num_usable_blocks)
        seq = Sequence(self._new_seq_id(), request.request_id, 0, request.prompt_token_ids, kv.block_size)
        if request.cache_salt is not None:
            seq.cache_keys = (("salt", request.cache_salt),)
        group = SequenceGroup(request, seq)
        self._seqs[seq.seq_id] = seq
        self._groups[request.request_id] = group
        self.waiting.append(group)

    def abort_request(self, request_id: str) -> None:
        """Ends a request without further output. Unknown and finished ids are ignored."""
        group = self._groups.get(request_id)
        if group is not None:
            for seq in group.unfinished_seqs():
                self._finish(group, seq, SequenceStatus.FINISHED_ABORTED)

    def finish_sequence(self, request_id: str, index: int) -> None:
        """Ends one sequence as stopped, without further output: its text holds a stop string. Idempotent."""
        group = self._groups.get(request_id)
        if group is not None and index < len(group.seqs) and not group.seqs[index].is_finished:
            self._finish(group, group.seqs[index], SequenceStatus.FINISHED_STOPPED)

    def has_unfinished_requests(self) -> bool:
        return bool(self._groups)

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Decides the next step. It holds work whenever there are unfinished requests."""
        plan = StepPlan(self.max_num_batched_tokens)
        num_preemptions = self._num_preemptions
        displaced = self._schedule_running(plan)
        if self._num_preemptions == num_preemptions:  # who came in now would be the next to be preempted
            self._schedule_waiting(plan, displaced, now_s)
        while self.running and not plan.num_scheduled_tokens:
            # All blocks are held by beams that wait for displaced ones.
            newest = self.running.last()
            self._preempt(newest, newest.seqs_with(SequenceStatus.RUNNING))
            self._schedule_waiting(plan, [], now_s)
        assert plan.num_scheduled_tokens or not self._groups, "a step without work while requests wait"
        output = plan.to_scheduler_output(self._step_id, self._dropped_seq_ids)
        self._num_copied_blocks += len(plan.blocks_to_copy)
        self._dropped_seq_ids = []
        self._step_id += 1
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Takes in a step's results: tokens, forks, stops. Who has finished gives up its blocks at once."""
        news = StepNews()
        for seq_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            seq = self._seqs.get(seq_id)
            if seq is None:  # it ended while the step ran
                continue
            group = self._groups[seq.request_id]
            scored = runner_output.prompt_logprobs.get(seq_id)
            if scored:
                news.add_prompt_logprobs(group, due_prompt_logprobs(group, seq.num_computed_tokens, scored))
            seq.num_computed_tokens += num_tokens
            self.kv_cache_manager.cache_full_blocks(seq)
            if seq.num_computed_tokens < seq.num_tokens:
                continue
            if not group.is_beam_search:
                self._take_draws(group, seq, runner_output.sampled[seq_id], news)
                continue
            seq.candidates = runner_output.beam_candidates[seq_id]
            if all(beam.candidates is not None for beam in group.seqs):
                self._step_beams(group, news)
        return EngineCoreOutputs(news.to_outputs(), self._stats())

    def check_integrity(self) -> None:
        """Checks queues, statuses and the block ledger. O(everything): for tests and idle moments.

        Raises:
          AssertionError: Something is lost or counted wrongly.
        """
        queued = [group.request_id for queue in (self.waiting, self.running) for group in queue]
        assert sorted(queued) == sorted(self._groups), "a group must stand in exactly one queue"
        unfinished = [seq for group in self._groups.values() for seq in group.unfinished_seqs()]
        assert {seq.seq_id: seq for seq in unfinished} == self._seqs, "a sequence is lost"
        assert all(group.unfinished_seqs() for group in self._groups.values()), "a finished group is still queued"
        assert not [seq for group in self.waiting for seq in group.seqs_with(SequenceStatus.RUNNING)]
        assert self._num_seats_taken() <= self.max_num_seqs, "more sequences than max_num_seqs"
        self.kv_cache_manager.check_integrity(seq for seq in unfinished if seq.status is SequenceStatus.RUNNING)
        known = set(self.kv_cache_manager.req_to_block_hashes)
        assert known <= self._seqs.keys(), "block hashes of a finished sequence are kept"

    def _schedule_running(self, plan: StepPlan) -> list[tuple[SequenceGroup, Sequence]]:
        """Returns the sequences of running groups that hold no blocks."""
        displaced: list[tuple[SequenceGroup, Sequence]] = []
        for group in list(self.running):
            if group not in self.running:  # preempted, and so is everybody behind it
                break
            for seq in group.unfinished_seqs():
                if not plan.token_budget:
                    return displaced
                if seq.candidates is not None:
                    continue
                if seq.status is SequenceStatus.WAITING:
                    displaced.append((group, seq))
                    continue
                num_tokens = min(seq.num_tokens - seq.num_computed_tokens, plan.token_budget)
                allocation = self._allocate_or_preempt(group, seq, num_tokens)
                if allocation is None:
                    break  # this one was preempted; so are its younger siblings
                self._add_to_plan(plan, group, seq, num_tokens, allocation)
        return displaced

    def _allocate_or_preempt(self, group: SequenceGroup, seq: Sequence, num_tokens: int) -> Allocation | None:
        """Returns None if the sequence had to be preempted itself."""
        while seq.status is SequenceStatus.RUNNING:
            allocation = self.kv_cache_manager.allocate_slots(seq, num_tokens)
            if allocation is not None:
                return allocation
            newest = self.running.last()
            if newest is group:  # elder siblings are in this step already: give way from the youngest up
                self._preempt(group, group.seqs_with(SequenceStatus.RUNNING)[-1:])
            else:
                self._preempt(newest, newest.seqs_with(SequenceStatus.RUNNING))
        return None

    def _preempt(self, group: SequenceGroup, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.kv_cache_manager.free(seq.seq_id)
            self._drop_from_worker(seq)
            seq.status = SequenceStatus.WAITING
            seq.num_computed_tokens = 0
            seq.num_preemptions += 1
            self._num_preemptions += 1
        if not group.seqs_with(SequenceStatus.RUNNING):
            self.running.remove(group)
            self.waiting.prepend(group)

    def _schedule_waiting(self, plan: StepPlan, displaced: list[tuple[SequenceGroup, Sequence]], now_s: float) -> None:
        for group, seq in displaced:
            if not plan.token_budget or not self._admit(plan, group, seq):
                return
        num_free_seats = self.max_num_seqs - self._num_seats_taken() if self.waiting else 0
        while self.waiting and plan.token_budget:
            group = self.waiting.first()
            num_free_seats -= group.get_max_num_running_seqs()
            if num_free_seats < 0:
                return
            for seq in group.seqs_with(SequenceStatus.WAITING):
                if seq.candidates is not None:
                    continue
                if not plan.token_budget or not self._admit(plan, group, seq):
                    return
                if group in self.waiting:
                    self.waiting.remove(group)
                    self.running.append(group)
                    if group.first_scheduled_time_s is None:
                        group.first_scheduled_time_s = now_s

    def _admit(self, plan: StepPlan, group: SequenceGroup, seq: Sequence) -> bool:
        """Starts a sequence that holds no blocks. Returns False, with nothing changed, when blocks are short.

        It gets the blocks of all its tokens, even if the budget lets it compute only some now: a prompt that
        is half computed when blocks run out would be computed twice.
        """
        kv = self.kv_cache_manager
        hits = [] if group.has_due_prompt_logprobs else kv.get_computed_blocks(seq)
        num_hit_tokens = len(hits) * kv.block_size
        allocation = kv.allocate_slots(seq, seq.num_tokens - num_hit_tokens, hits)
        if allocation is None:
            return False
        if not seq.num_preemptions:
            group.num_cached_tokens = num_hit_tokens
            if not group.has_due_prompt_logprobs:
                kv.record_lookup(seq.num_tokens, num_hit_tokens)
        seq.status = SequenceStatus.RUNNING
        seq.num_computed_tokens = num_hit_tokens
        num_tokens = min(seq.num_tokens - num_hit_tokens, plan.token_budget)
        self._add_to_plan(plan, group, seq, num_tokens, allocation)
        return True

    def _add_to_plan(
        self, plan: StepPlan, group: SequenceGroup, seq: Sequence, num_tokens: int, allocation: Allocation
    ) -> None:
        block_ids = None if seq.is_on_worker else self.kv_cache_manager.block_ids(seq.seq_id)
        plan.add(group, seq, num_tokens, allocation, block_ids)

    def _take_draws(self, group: SequenceGroup, parent: Sequence, draws: list[SampledToken], news: StepNews) -> None:
        """Appends draw 0 to the sequence itself; each further one starts child j, as draw j used seed + j."""
        seqs = [parent]
        if not group.is_forked:
            n = group.request.sampling_params.n
            seqs += [self._fork(group, parent, index) for index in range(1, n)]
        for seq, draw in zip(seqs, draws, strict=True):
            seq.append_token_id(draw.token_id)
            status = check_stop(group, seq, self.max_model_len)
            if status is not None:
                self._finish(group, seq, status)
            news.add_token(group, seq, draw)

    def _fork(self, group: SequenceGroup, parent: Sequence, index: int) -> Sequence:
        child = parent.fork(self._new_seq_id(), index)
        if parent.status is SequenceStatus.RUNNING:
            self.kv_cache_manager.fork(parent.seq_id, child.seq_id)
        else:  # a beam that was preempted after its last step: the child comes back in its place
            child.num_preemptions = parent.num_preemptions
        self._seqs[child.seq_id] = child
        group.seqs.append(child)
        return child

    def _step_beams(self, group: SequenceGroup, news: StepNews) -> None:
        """Takes a beam search one token further, or ends it."""
        kept, group.hypotheses = step_beams(group, self.max_model_len)
        if kept:
            self._replace_beams(group, kept)
            return
        for seq in group.unfinished_seqs():
            self._finish(group, seq, SequenceStatus.FINISHED_STOPPED)
        news.add_hypotheses(group)

    def _replace_beams(self, group: SequenceGroup, kept: list[Candidate]) -> None:
        """Makes the kept candidates the group's beams. All forks come before anything is appended or freed."""
        parents, group.seqs = group.seqs, []
        candidates = {index: parent.candidates for index, parent in enumerate(parents) if parent.candidates is not None}
        unused = dict(enumerate(parents))
        for index, candidate in enumerate(kept):
            parent = unused.pop(candidate.beam, None)
            if parent is None:
                self._fork(group, parents[candidate.beam], index)
            else:  # a parent becomes its own best child
                parent.index = index
                group.seqs.append(parent)
        num_logprobs = group.request.sampling_params.logprobs
        for beam, candidate in zip(group.seqs, kept, strict=True):
            extend_beam(beam, candidate, candidates[candidate.beam], num_logprobs)
        for parent in unused.values():
            self._finish(group, parent, SequenceStatus.FINISHED_STOPPED)

    def _finish(self, group: SequenceGroup, seq: Sequence, status: SequenceStatus) -> None:
        seq.status = status
        self.kv_cache_manager.free(seq.seq_id)
        self.kv_cache_manager.free_block_hashes(seq.seq_id)
        self._drop_from_worker(seq)
        del self._seqs[seq.seq_id]
        if group.is_finished:
            (self.running if group in self.running else self.waiting).remove(group)
            del self._groups[group.request_id]

    def _drop_from_worker(self, seq: Sequence) -> None:
        if seq.is_on_worker:
            self._dropped_seq_ids.append(seq.seq_id)
            seq.is_on_worker = False

    def _num_seats_taken(self) -> int:
        return sum(group.get_max_num_running_seqs() for group in self.running)

    def _new_seq_id(self) -> int:
        self._num_seqs_made += 1
        return self._num_seqs_made - 1

    def _stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_free_blocks=self.kv_cache_manager.block_pool.num_free_blocks,
            num_preemptions=self._num_preemptions,
            num_copied_blocks=self._num_copied_blocks,
            prefix_cache_queries=self.kv_cache_manager.num_queried_tokens,
            prefix_cache_hits=self.kv_cache_manager.num_hit_tokens,
        )
