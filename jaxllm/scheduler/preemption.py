"""Preemption: takes blocks back from those who run. Doesn't know why, nor who is next."""

from jaxllm.scheduler.kv_cache_manager import KVCacheManager
from jaxllm.scheduler.request_queue import Queues
from jaxllm.sequence import Sequence, SequenceGroup, SequenceStatus


class Preemption:
    """Preempted sequences give up their blocks and are computed again from their tokens.

    Attributes:
      num_preemptions: Sequences preempted so far.
      dropped_seq_ids: Whose rows the worker is to forget with the next step.
    """

    def __init__(self, queues: Queues, kv_cache_manager: KVCacheManager) -> None:
        self._queues = queues
        self._kv = kv_cache_manager
        self.num_preemptions = 0
        self.dropped_seq_ids: list[int] = []

    def preempt(self, group: SequenceGroup) -> None:
        """Takes all of a running group's blocks; it leaves the running queue."""
        self._recompute(group, group.seqs_with(SequenceStatus.RUNNING))

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
