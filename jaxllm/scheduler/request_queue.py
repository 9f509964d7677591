"""RequestQueue: groups in order of arrival. Knows no budget and no block."""

from collections import OrderedDict
from collections.abc import Iterator

from jaxllm.sequence import SequenceGroup


class RequestQueue:
    """First come, first served; every operation is O(1), leaving from the middle too."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, SequenceGroup] = OrderedDict()

    def append(self, group: SequenceGroup) -> None:
        assert group.request_id not in self._groups
        self._groups[group.request_id] = group

    def prepend(self, group: SequenceGroup) -> None:
        self.append(group)
        self._groups.move_to_end(group.request_id, last=False)

    def first(self) -> SequenceGroup:
        return next(iter(self._groups.values()))

    def last(self) -> SequenceGroup:
        return next(reversed(self._groups.values()))

    def remove(self, group: SequenceGroup) -> None:
        del self._groups[group.request_id]

    def __contains__(self, group: SequenceGroup) -> bool:
        return group.request_id in self._groups

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)
