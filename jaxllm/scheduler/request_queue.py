"""RequestQueue, Queues: groups in the policy's order, and who stands where. Know no budget and no block."""

from bisect import bisect_left
from collections.abc import Iterator

from jaxllm.scheduler.policy import QueueKey
from jaxllm.sequence import SequenceGroup


class RequestQueue:
    """Groups by their queue_key, lowest first. A group that comes back thus finds its old place."""

    def __init__(self) -> None:
        self._keys: list[QueueKey] = []
        self._groups: list[SequenceGroup] = []  # in the keys' order

    def add(self, group: SequenceGroup) -> None:
        assert group not in self
        index = bisect_left(self._keys, group.queue_key)
        self._keys.insert(index, group.queue_key)
        self._groups.insert(index, group)

    def remove(self, group: SequenceGroup) -> None:
        assert group in self
        index = bisect_left(self._keys, group.queue_key)
        del self._keys[index]
        del self._groups[index]

    def first(self) -> SequenceGroup:
        return self._groups[0]

    def last(self) -> SequenceGroup:
        return self._groups[-1]

    def __contains__(self, group: SequenceGroup) -> bool:
        index = bisect_left(self._keys, group.queue_key)
        return index < len(self._keys) and self._keys[index] == group.queue_key

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._keys)


class Queues:
    """Every group stands in exactly one of these.

    Attributes:
      waiting: None of the group's sequences holds blocks.
      running: They hold device blocks, but for those that made room for their own elder siblings.
      swapped: They hold host blocks, with the same exception.
    """

    def __init__(self) -> None:
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.swapped = RequestQueue()

    @property
    def all(self) -> tuple[RequestQueue, ...]:
        return (self.waiting, self.running, self.swapped)

    def move(self, group: SequenceGroup, target: RequestQueue) -> None:
        self.remove(group)
        target.add(group)

    def remove(self, group: SequenceGroup) -> None:
        next(queue for queue in self.all if group in queue).remove(group)

    def num_seats_taken(self) -> int:
        """Returns how many sequences the running groups may come to run at once."""
        return sum(group.get_max_num_running_seqs() for group in self.running)
