"""Preemption: takes blocks back from those who run. Doesn't know why, nor who is next."""

from jaxllm.scheduler.kv_cache_manager import KVCacheManager
from jaxllm.scheduler.request_queue import Queues
from jaxllm.scheduler.step_plan import StepPlan
from jaxllm.sequence import Sequence, SequenceGroup, SequenceStatus


class Preemption:
    """Swaps whole groups to host memory, or lets sequences be computed again from their tokens.

    Args:
      mode: "recompute"; "swap", which recomputes only when host memory is full; "auto", which swaps the groups
        that may run several sequences.
      queues: Who runs, and where the preempted go.
      kv_cache_manager: Their blocks.

    Attributes:
      num_preemptions: Sequences preempted so far.
      dropped_seq_ids: Whose rows the worker is to forget with the next step.
    """

    def __init__(self, mode: str, queues: Queues, kv_cache_manager: KVCacheManager) -> None:
        self._mode = mode
        self._queues = queues
        self._kv = kv_cache_manager
        self.num_preemptions = 0
        self.dropped_seq_ids: list[int] = []

    def preempt(self, plan: StepPlan, group: SequenceGroup) -> None:
        """Takes all of a running group's blocks; it leaves the running queue."""
        if self.may_swap(group) and self.swap_out(plan, group):
            return
        self.recompute(group)

    def recompute(self, group: SequenceGroup) -> None:
        """Takes all of a running group's blocks, to be computed again."""
        self._recompute(group, group.seqs_with(SequenceStatus.RUNNING))

    def may_swap(self, group: SequenceGroup) -> bool:
        if self._mode == "recompute" or not self._kv.host_blocks.num_blocks:
            return False
        return self._mode == "swap" or group.get_max_num_running_seqs() > 1

    def swap_out(self, plan: StepPlan, group: SequenceGroup) -> bool:
        """Moves a running group to host memory. Returns False, with nothing changed, if it can't."""
        seqs = group.seqs_with(SequenceStatus.RUNNING)
        pairs = self._kv.swap_out(seq.seq_id for seq in seqs) if seqs else None
        if pairs is None:
            return False
        plan.blocks_to_swap_out += pairs
        for seq in seqs:
            self._leave(seq, SequenceStatus.SWAPPED)
        self._queues.move(group, self._queues.swapped)
        return True

    def displace_youngest(self, group: SequenceGroup) -> None:
        """Takes the blocks of the group's youngest running sequence."""
        self._recompute(group, group.seqs_with(SequenceStatus.RUNNING)[-1:])

    def drop_from_worker(self, seq: Sequence) -> None:
        if seq.is_on_worker:
            self.dropped_seq_ids.append(seq.seq_id)
            seq.is_on_worker = False

    def take_dropped_seq_ids(self) -> list[int]:
        """Returns dropped_seq_ids, and starts anew."""
        dropped, self.dropped_seq_ids = self.dropped_seq_ids, []
        return dropped

    def _recompute(self, group: SequenceGroup, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self._kv.free(seq.seq_id)
            self._leave(seq, SequenceStatus.WAITING)
            seq.num_computed_tokens = 0
        if not group.seqs_with(SequenceStatus.RUNNING):
            self._queues.move(group, self._queues.waiting)

    def _leave(self, seq: Sequence, status: SequenceStatus) -> None:
        self.drop_from_worker(seq)
        seq.status = status
        seq.num_preemptions += 1
        self.num_preemptions += 1
