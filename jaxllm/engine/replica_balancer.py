"""ReplicaBalancer: which data parallel replica takes a request, and which one has it. Knows no link and no thread.

Load is counted in tokens of work ahead: the prompt tokens that wait to be computed, and for each sequence the tokens
that it may still generate, of which nobody knows more than that they are at most so many. A replica that served the
same beginning of a prompt lately has that many tokens less to compute, if its prefix cache still holds them. A request
goes where its own prompt and the load before it are least together; ties go round.

    load 700, 512 tokens cached     1000-token prompt     700 + 488 = 1188   <- goes there
    load 500, nothing cached                              500 + 1000 = 1500
"""

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

from jaxllm.messages import EngineCoreOutputs, EngineCoreRequest

# What a sequence counts while it generates, if it may generate as much: typical answers are some hundred tokens long.
_TOKENS_PER_SEQUENCE = 256
_MAX_PREFIXES = 8192  # remembered of each replica
_MAX_PREFIX_BLOCKS = 1024


@dataclass(slots=True, eq=False)
class _Placed:
    engine_index: int
    num_waiting: int  # prompt tokens that aren't computed yet, as far as we know
    tokens_per_sequence: int
    live: set[int]  # indices of its sequences that haven't ended

    @property
    def load(self) -> int:
        return self.num_waiting + self.tokens_per_sequence * len(self.live)


@dataclass(slots=True, eq=False)
class _Replica:
    load: int = 0
    prefixes: "OrderedDict[bytes, None]" = field(default_factory=OrderedDict)  # the latest last


class ReplicaBalancer:
    """Follows each request from its placement to its end.

    Args:
      num_replicas: At least one.
      block_size: Tokens of a KV cache block, which is what can be shared.
      enable_affinity: Whether replicas have prefix caches.
    """

    def __init__(self, num_replicas: int, block_size: int, enable_affinity: bool = True) -> None:
        self._replicas = [_Replica() for _ in range(num_replicas)]
        self._placed: dict[str, _Placed] = {}
        self._block_size = block_size
        self._enable_affinity = enable_affinity
        self._next = 0  # who is first among equals

    @property
    def loads(self) -> list[int]:
        """Each replica's load, in tokens."""
        return [replica.load for replica in self._replicas]

    def place(self, request: EngineCoreRequest) -> int:
        """Chooses a replica for a request, and counts it there."""
        prefixes = self._prefixes(request) if self._enable_affinity else []
        num_prompt = len(request.prompt_token_ids)
        # The last token is always computed: somebody has to predict the next one.
        cached = [min(_num_cached(replica, prefixes), num_prompt - 1) for replica in self._replicas]
        size = len(self._replicas)
        turn = [(self._next + step) % size for step in range(size)]
        index = min(turn, key=lambda index: self._replicas[index].load - cached[index])
        self._next = (index + 1) % size
        placed = _Placed(
            engine_index=index,
            num_waiting=num_prompt - cached[index],
            tokens_per_sequence=min(request.max_tokens, _TOKENS_PER_SEQUENCE),
            live=set(range(request.sampling_params.n)),
        )
        self._placed[request.request_id] = placed
        replica = self._replicas[index]
        replica.load += placed.load
        for _, key in prefixes:
            replica.prefixes[key] = None
            replica.prefixes.move_to_end(key)
        while len(replica.prefixes) > _MAX_PREFIXES:
            replica.prefixes.popitem(last=False)
        return index

    def engine_of(self, request_id: str) -> int | None:
        """Returns who has a request, None if it has ended."""
        placed = self._placed.get(request_id)
        return None if placed is None else placed.engine_index

    def remove(self, request_id: str) -> None:
        """A request has ended. Unknown ids are ignored."""
        placed = self._placed.pop(request_id, None)
        if placed is not None:
            self._replicas[placed.engine_index].load -= placed.load

    def finish_sequence(self, request_id: str, index: int) -> None:
        """One of a request's sequences has ended, the last one with the request. May be said twice."""
        placed = self._placed.get(request_id)
        if placed is not None and index in placed.live:
            placed.live.remove(index)
            self._replicas[placed.engine_index].load -= placed.tokens_per_sequence
            if not placed.live:
                self.remove(request_id)

    def update(self, outputs: EngineCoreOutputs) -> None:
        """Takes a step's news."""
        for refused in outputs.refused:
            self.remove(refused.request_id)
        for news in outputs.outputs:
            placed = self._placed.get(news.request_id)
            if placed is None:
                continue
            if news.finished:
                self.remove(news.request_id)
                continue
            if placed.num_waiting and any(sequence.new_tokens for sequence in news.sequences):
                self._replicas[placed.engine_index].load -= placed.num_waiting
                placed.num_waiting = 0
            for sequence in news.sequences:
                if sequence.finish_reason is not None:
                    self.finish_sequence(news.request_id, sequence.index)

    def forget_prefixes(self) -> None:
        """The replicas' prefix caches are empty again."""
        for replica in self._replicas:
            replica.prefixes.clear()

    def _prefixes(self, request: EngineCoreRequest) -> list[tuple[int, bytes]]:
        """Returns the prompt's beginnings of 1, 2, 4, 8, ... blocks: (tokens, digest)."""
        prefixes = []
        ids, start, num_tokens = request.prompt_token_ids, 0, self._block_size
        digest = hashlib.sha256(repr(request.cache_salt).encode())
        while num_tokens <= min(len(ids), _MAX_PREFIX_BLOCKS * self._block_size):
            digest.update(array("q", ids[start:num_tokens]).tobytes())
            prefixes.append((num_tokens, digest.digest()))
            start, num_tokens = num_tokens, 2 * num_tokens
        return prefixes


def _num_cached(replica: _Replica, prefixes: list[tuple[int, bytes]]) -> int:
    """Returns the length of the longest of these beginnings that a replica has served."""
    return next((num_tokens for num_tokens, key in reversed(prefixes) if key in replica.prefixes), 0)
