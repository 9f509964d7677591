"""Scheduler: decides each step's work and takes in its results. Knows no text, no device and no process.

StepBuilder says who takes part in a step. When somebody who runs finds no free block, the last group in the
policy's order gives up its blocks (preemption). The beams of a beam search go forward together: one that has its
candidates already waits for the others.
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
from jaxllm.scheduler.admission import Admission
from jaxllm.scheduler.beam_search import Candidate, extend_beam, step_beams
from jaxllm.scheduler.kv_cache_manager import KVCacheManager
from jaxllm.scheduler.policy import queue_key
from jaxllm.scheduler.preemption import Preemption
from jaxllm.scheduler.request_queue import Queues
from jaxllm.scheduler.step_builder import StepBuilder
from jaxllm.scheduler.step_news import StepNews, due_prompt_logprobs
from jaxllm.scheduler.step_plan import StepPlan
from jaxllm.scheduler.stop_rules import check_stop
from jaxllm.sequence import Sequence, SequenceGroup, SequenceStatus


class Scheduler:
    """Call schedule() and update_from_output() in turn; requests may come and go between any two calls.

    A sequence that made room for its own elder siblings is WAITING inside a running group; it comes before
    everybody who waits. A beam that has its candidates is never computed again: it waits in its state, with or
    without blocks.
    """

    def __init__(self, config: SchedulerConfig, cache_config: CacheConfig, kv_info: KVCacheInfo) -> None:
        self.max_num_seqs = min(config.max_num_seqs, kv_info.max_num_seqs)
        self.max_num_batched_tokens = min(config.max_num_batched_tokens, kv_info.max_num_batched_tokens)
        self.max_model_len = config.max_model_len
        self._policy = config.policy
        self.kv_cache_manager = KVCacheManager(
            kv_info.num_device_blocks,
            kv_info.block_size,
            cache_config.enable_prefix_caching,
            num_host_blocks=kv_info.num_host_blocks,
        )
        self.queues = Queues()
        self._preemption = Preemption(config.preemption_mode, self.queues, self.kv_cache_manager)
        self._step_builder = StepBuilder(
            config, self.max_num_seqs, self.queues, self.kv_cache_manager, self._preemption
        )
        self._admission = Admission(config, kv_info)
        self._groups: dict[str, SequenceGroup] = {}
        self._seqs: dict[int, Sequence] = {}  # the unfinished ones
        self._num_seqs_made = 0
        self._step_id = 0
        self._num_copied_blocks = 0
        self._num_swapped_out_blocks = 0
        self._num_swapped_in_blocks = 0

    def add_request(self, request: EngineCoreRequest) -> None:
        """Puts a request at the end of the queue.

        Raises:
          InvalidRequestError: It could never run, or a live request has its id. Nothing has changed.
        """
        if request.request_id in self._groups:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use by a request that still runs")
        self._admission.check(request)
        block_size = self.kv_cache_manager.block_size
        seq = Sequence(self._new_seq_id(), request.request_id, 0, request.prompt_token_ids, block_size)
        if request.cache_salt is not None:
            seq.cache_keys = (("salt", request.cache_salt),)
        group = SequenceGroup(request, seq, self.max_model_len)
        group.queue_key = queue_key(self._policy, request, seq.seq_id)
        self._seqs[seq.seq_id] = seq
        self._groups[request.request_id] = group
        self.queues.waiting.add(group)

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
        self._step_builder.build(plan, now_s)
        assert plan.num_scheduled_tokens or not self._groups, "a step without work while requests wait"
        output = plan.to_scheduler_output(self._step_id, self._preemption.take_dropped_seq_ids())
        self._num_copied_blocks += len(plan.blocks_to_copy)
        self._num_swapped_out_blocks += len(plan.blocks_to_swap_out)
        self._num_swapped_in_blocks += len(plan.blocks_to_swap_in)
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
        return EngineCoreOutputs(news.to_outputs(), self.stats())

    def check_integrity(self) -> None:
        """Checks queues, statuses and the block ledger. O(everything): for tests and idle moments.

        Raises:
          AssertionError: Something is lost or counted wrongly.
        """
        queued = [group.request_id for queue in self.queues.all for group in queue]
        assert sorted(queued) == sorted(self._groups), "a group must stand in exactly one queue"
        unfinished = [seq for group in self._groups.values() for seq in group.unfinished_seqs()]
        assert {seq.seq_id: seq for seq in unfinished} == self._seqs, "a sequence is lost"
        assert all(group.unfinished_seqs() for group in self._groups.values()), "a finished group is still queued"
        for queue, allowed in (
            (self.queues.waiting, {SequenceStatus.WAITING}),
            (self.queues.running, {SequenceStatus.WAITING, SequenceStatus.RUNNING}),
            (self.queues.swapped, {SequenceStatus.WAITING, SequenceStatus.SWAPPED}),
        ):
            assert {seq.status for group in queue for seq in group.unfinished_seqs()} <= allowed, "in the wrong queue"
        assert all(group.seqs_with(SequenceStatus.SWAPPED) for group in self.queues.swapped)
        assert self.queues.num_seats_taken() <= self.max_num_seqs, "more sequences than max_num_seqs"
        self.kv_cache_manager.check_integrity(seq for seq in unfinished if seq.status is SequenceStatus.RUNNING)
        self.kv_cache_manager.host_blocks.check_integrity(
            seq for seq in unfinished if seq.status is SequenceStatus.SWAPPED
        )
        known = set(self.kv_cache_manager.req_to_block_hashes)
        assert known <= self._seqs.keys(), "block hashes of a finished sequence are kept"

    def _take_draws(self, group: SequenceGroup, parent: Sequence, draws: list[SampledToken], news: StepNews) -> None:
        """Appends draw 0 to the sequence itself; each further one starts child j, as draw j used seed + j."""
        if group.is_forked:
            self._append(group, parent, draws, news)
            return
        children = [self._fork(group, parent, index) for index in range(1, group.n)]
        for seq, draw in zip([parent, *children], draws, strict=True):
            self._append(group, seq, [draw], news)

    def _append(self, group: SequenceGroup, seq: Sequence, draws: list[SampledToken], news: StepNews) -> None:
        """Appends a sequence's one draw, which may end it."""
        (draw,) = draws
        seq.append_token_id(draw.token_id)
        status = check_stop(group, seq)
        if status is not None:
            self._finish(group, seq, status)
        news.add_tokens(group, seq, draws)

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
        kept, group.hypotheses = step_beams(group)
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
        self.kv_cache_manager.host_blocks.free(seq.seq_id)
        self.kv_cache_manager.free_block_hashes(seq.seq_id)
        self._preemption.drop_from_worker(seq)
        del self._seqs[seq.seq_id]
        if group.is_finished:
            self.queues.remove(group)
            del self._groups[group.request_id]
        elif group in self.queues.swapped and not group.seqs_with(SequenceStatus.SWAPPED):
            self.queues.move(group, self.queues.waiting)  # its other sequences hold no blocks

    def _new_seq_id(self) -> int:
        self._num_seqs_made += 1
        return self._num_seqs_made - 1

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.queues.running),
            num_waiting=len(self.queues.waiting),
            num_free_blocks=self.kv_cache_manager.block_pool.num_free_blocks,
            num_preemptions=self._preemption.num_preemptions,
            num_copied_blocks=self._num_copied_blocks,
            prefix_cache_queries=self.kv_cache_manager.num_queried_tokens,
            prefix_cache_hits=self.kv_cache_manager.num_hit_tokens,
            num_swapped=len(self.queues.swapped),
            num_swapped_out_blocks=self._num_swapped_out_blocks,
            num_swapped_in_blocks=self._num_swapped_in_blocks,
            num_free_host_blocks=self.kv_cache_manager.host_blocks.num_free_blocks,
        )
