"""SchedulerEpisode: one random life of a scheduler on a FakeExecutor, told by its seed. Knows no test framework."""

import random
from collections.abc import Sequence
from typing import Any

from jaxllm.config import CacheConfig, SchedulerConfig
from jaxllm.exceptions import InvalidRequestError
from jaxllm.messages import EngineCoreRequest
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.scheduler import Scheduler
from tests.fakes.fake_executor import FakeExecutor

_LONGEST_DRAIN = 20_000


def draw(token_ids: Sequence[int], seed: int) -> int:
    """A model of few words, some of which end a sequence (2 is end-of-sequence, 4 a stop token)."""
    value = hash((tuple(token_ids), seed)) % 64
    return (2 if value == 0 else 4) if value < 2 else 5 + value % 2


def candidates(token_ids: Sequence[int]) -> dict[int, float]:
    """The same few words for beams; the stops are rare enough to keep searches going."""
    return {token_id: -(hash((*token_ids, token_id)) % 64) / 16 - 2 * (token_id < 5) for token_id in (2, 4, 5, 6)}


def _random_policies(rng: random.Random) -> dict[str, Any]:
    policies: dict[str, Any] = {
        "policy": rng.choice(["fcfs", "priority"]),
        "preemption_mode": rng.choice(["auto", "swap", "recompute"]),
        "watermark": rng.choice([0.0, 0.01, 0.3]),
        "scheduler_delay_factor": rng.choice([0.0, 0.0, 1.5]),
        "enable_chunked_prefill": rng.random() < 0.7,
    }
    if policies["enable_chunked_prefill"]:
        policies["long_prefill_token_threshold"] = rng.choice([0, 0, 1, 3])
        policies["max_num_partial_prefills"] = rng.randint(1, 3)
    return policies


class SchedulerEpisode:
    """Adds, steps, aborts, finishes and resets at random; checks the ledgers after each action.

    Attributes:
      num_steps: Steps so far.
      live: request_id -> indices of its unfinished sequences.
    """

    def __init__(self, seed: int) -> None:
        self._rng = rng = random.Random(seed)
        policies = _random_policies(rng)
        max_model_len = rng.randint(4, 40)
        max_num_batched_tokens = rng.randint(1, 24)
        if not policies["enable_chunked_prefill"]:
            max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
        self.executor = FakeExecutor(
            draw=draw,
            candidates=candidates,
            num_blocks=rng.randint(4, 40),
            block_size=rng.choice([1, 2, 4]),
            max_num_seqs=rng.randint(1, 8),
            max_num_batched_tokens=max_num_batched_tokens,
            num_host_blocks=rng.choice([0, 2, 5, 12, 40]),
        )
        info = self.executor.initialize()
        config = SchedulerConfig(
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            **policies,
        )
        self.scheduler = Scheduler(config, CacheConfig(enable_prefix_caching=rng.random() < 0.7), info)
        self.num_steps = 0
        self.live: dict[str, set[int]] = {}
        self._num_requests = 0

    def run(self, num_actions: int) -> None:
        """Acts at random, then lets everything end.

        Raises:
          AssertionError: A rule is broken; the message names it.
        """
        actions = (self.add, self.step, self.abort, self.finish_sequence, self.reset_prefix_cache)
        weights = (6, 20, 1, 1, 1)
        for action in self._rng.choices(actions, weights, k=num_actions):
            action()
            self.scheduler.check_integrity()
            assert self.scheduler.has_unfinished_requests() == bool(self.live), "a request is lost"
        self.drain()

    def drain(self) -> None:
        last = self.num_steps + _LONGEST_DRAIN
        while self.live:
            assert self.num_steps < last, "a request never ends"
            self.step()
        self.scheduler.check_integrity()
        kv = self.scheduler.kv_cache_manager
        assert kv.block_pool.num_free_blocks == kv.block_pool.num_usable_blocks, "a block is lost"
        host_pool = kv.host_blocks.block_pool
        assert host_pool is None or host_pool.num_free_blocks == host_pool.num_usable_blocks, "a host block is lost"

    def add(self) -> None:
        rng = self._rng
        request_id = f"r{self._num_requests}"
        self._num_requests += 1
        n = rng.randint(1, 4)
        is_beam_search = rng.random() < 0.3
        params: dict[str, Any] = {"n": n, "max_tokens": rng.randint(1, 20), "stop_token_ids": [4]}
        if is_beam_search:
            params |= {
                "use_beam_search": True,
                "temperature": 0.0,
                "best_of": n + rng.randint(0, 2),
                "early_stopping": rng.choice([False, True, "never"]),
            }
        else:
            params["prompt_logprobs"] = rng.choice([None, None, 0])
        common = random.Random(1).choices([5, 6], k=rng.randint(0, 16))  # prefixes meet often
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=common + rng.choices([5, 6], k=rng.randint(1, 4)),
            sampling_params=SamplingParams(**params),
            eos_token_ids=[2],
            arrival_time_s=float(self.num_steps),
            seed=rng.randint(0, 3),
            max_tokens=params["max_tokens"],
            priority=rng.randint(-1, 1),
            cache_salt=rng.choice([None, None, "x"]),
        )
        try:
            self.scheduler.add_request(request)
        except InvalidRequestError:
            return
        self.live[request_id] = set(range(n))

    def step(self) -> None:
        if not self.live:
            return
        step = self.scheduler.schedule(float(self.num_steps))
        self.scheduler.check_integrity()
        outputs = self.scheduler.update_from_output(step, self.executor.execute_model(step)).outputs
        self.num_steps += 1
        for output in outputs:
            for seq in output.sequences:
                if seq.finish_reason is not None:
                    self.live[output.request_id].remove(seq.index)
            assert output.finished == (not self.live[output.request_id]), "finished isn't what has finished"
            if output.finished:
                del self.live[output.request_id]

    def abort(self) -> None:
        if self.live:
            request_id = self._rng.choice(sorted(self.live))
            self.scheduler.abort_request(request_id)
            del self.live[request_id]

    def finish_sequence(self) -> None:
        if not self.live:
            return
        request_id = self._rng.choice(sorted(self.live))
        index = self._rng.choice(sorted(self.live[request_id]))
        group = self.scheduler._groups[request_id]
        if group.is_beam_search:
            return  # no stop strings there
        if index >= len(group.seqs) or not group.seqs[index].num_output_tokens:
            return  # a stop string is found in a text, so there are tokens
        self.scheduler.finish_sequence(request_id, index)
        self.live[request_id].remove(index)
        if not self.live[request_id]:
            del self.live[request_id]

    def reset_prefix_cache(self) -> None:
        kv = self.scheduler.kv_cache_manager
        assert kv.reset_prefix_cache() == (not kv.req_to_blocks)
