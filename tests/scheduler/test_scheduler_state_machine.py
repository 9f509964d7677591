"""Whatever comes in whatever order: no block is lost or wrongly shared, no limit passed, every request ends.

FakeExecutor checks in each step that every block table spells exactly its sequence's tokens.
"""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxllm.exceptions import InvalidRequestError
from jaxllm.messages import ModelRunnerOutput, SchedulerOutput
from tests.fakes.fake_executor import FakeExecutor
from tests.fakes.scheduler_episode import candidates, draw
from tests.scheduler.builders import beam_params, make_request, make_scheduler

_COMMON = [5, 6, 6, 5, 6, 5, 5, 5, 6, 6, 6, 6, 5, 5, 6, 6]  # prompts begin with it: prefixes meet often
_PROMPTS = st.builds(
    lambda length, tail: _COMMON[:length] + tail,
    st.integers(0, len(_COMMON)),
    st.lists(st.integers(5, 6), min_size=1, max_size=4),
)

_CHUNKED = {
    "enable_chunked_prefill": st.just(True),
    "long_prefill_token_threshold": st.sampled_from([0, 0, 1, 3]),
    "max_num_partial_prefills": st.integers(1, 3),
}
_COMMON_POLICIES = {
    "policy": st.sampled_from(["fcfs", "priority"]),
    "preemption_mode": st.sampled_from(["auto", "swap", "recompute"]),
    "watermark": st.sampled_from([0.0, 0.01, 0.3]),
    "scheduler_delay_factor": st.sampled_from([0.0, 0.0, 1.5]),
}
_POLICIES = st.one_of(
    st.fixed_dictionaries({**_COMMON_POLICIES, **_CHUNKED}),
    st.fixed_dictionaries({**_COMMON_POLICIES, "enable_chunked_prefill": st.just(False)}),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 40),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 8),
        max_num_batched_tokens=st.integers(1, 24),
        max_model_len=st.integers(4, 40),
        enable_prefix_caching=st.booleans(),
        num_host_blocks=st.sampled_from([0, 2, 5, 12, 40]),
        policies=_POLICIES,
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool,
        num_host_blocks: int,
        policies: dict[str, Any],
    ) -> None:
        if not policies["enable_chunked_prefill"]:
            max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
        self.executor = FakeExecutor(
            draw=draw,
            candidates=candidates,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_host_blocks=num_host_blocks,
        )
        self.scheduler = make_scheduler(self.executor, max_model_len, enable_prefix_caching, **policies)
        self.now_s = 0.0
        self.max_model_len = max_model_len
        self.num_requests = 0
        self.in_flight: tuple[SchedulerOutput, ModelRunnerOutput] | None = None
        self.live: dict[str, dict[int, list[int]]] = {}  # request -> index -> tokens of its unfinished sequences
        self.limits: dict[str, tuple[int, int]] = {}  # request -> prompt tokens, max_tokens
        self.num_prompt_logprobs: dict[str, int] = {}

    @rule(
        prompt=_PROMPTS,
        n=st.integers(1, 4),
        max_tokens=st.integers(1, 20),
        wants_prompt_logprobs=st.booleans(),
        salt=st.sampled_from([None, None, "x"]),
        priority=st.integers(-1, 1),
    )
    def add(
        self, prompt: list[int], n: int, max_tokens: int, wants_prompt_logprobs: bool, salt: str | None, priority: int
    ) -> None:
        self._add(prompt, n, max_tokens, wants_prompt_logprobs, salt, priority)

    @rule(
        prompt=_PROMPTS,
        n=st.integers(1, 3),
        more=st.integers(0, 2),
        max_tokens=st.integers(1, 12),
        early_stopping=st.sampled_from([True, False, "never"]),
        priority=st.integers(-1, 1),
    )
    def add_beams(
        self, prompt: list[int], n: int, more: int, max_tokens: int, early_stopping: bool | str, priority: int
    ) -> None:
        params = beam_params(best_of=n + more, early_stopping=early_stopping)
        self._add(prompt, n, max_tokens, False, None, priority, **params)

    def _add(
        self,
        prompt: list[int],
        n: int,
        max_tokens: int,
        wants_prompt_logprobs: bool,
        salt: str | None,
        priority: int,
        **params: Any,
    ) -> None:
        request_id = f"r{self.num_requests}"
        self.num_requests += 1
        request = make_request(
            request_id,
            prompt,
            max_tokens=max_tokens,
            cache_salt=salt,
            priority=priority,
            arrival_time_s=self.now_s,
            n=n,
            stop_token_ids=[4],
            prompt_logprobs=0 if wants_prompt_logprobs else None,
            **params,
        )
        try:
            self.scheduler.add_request(request)
        except InvalidRequestError:
            return
        self.live[request_id] = {index: [] for index in range(n)}
        self.limits[request_id] = (len(prompt), max_tokens)
        self.num_prompt_logprobs[request_id] = 0 if wants_prompt_logprobs else len(prompt) - 1

    @precondition(lambda self: self.in_flight is None and self.live)
    @rule()
    def schedule(self) -> None:
        self.now_s += 1.0
        step = self.scheduler.schedule(self.now_s)
        self.in_flight = (step, self.executor.execute_model(step))

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def update(self) -> None:
        assert self.in_flight is not None
        step, results = self.in_flight
        self.in_flight = None
        for output in self.scheduler.update_from_output(step, results).outputs:
            live = self.live[output.request_id]
            for entry in output.prompt_logprobs:
                self.num_prompt_logprobs[output.request_id] += 1
                assert -entry.logprob == self.num_prompt_logprobs[output.request_id]
            for seq in output.sequences:
                live[seq.index] += [token.token_id for token in seq.new_tokens]
                if seq.finish_reason is not None:
                    self._check_end(output.request_id, live.pop(seq.index), seq.finish_reason)
            assert output.finished == (not live)
            if not live:
                del self.live[output.request_id]

    @precondition(lambda self: self.live)
    @rule(num_steps=st.integers(1, 12))
    def run_on(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        self.scheduler.abort_request(request_id)
        del self.live[request_id]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish_sequence(self, data: st.DataObject) -> None:
        """A stop string is found in a text, so there are tokens."""
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        live = self.live[request_id]
        index = data.draw(st.sampled_from(sorted(live)))
        if live[index]:
            self.scheduler.finish_sequence(request_id, index)
            del live[index]
            if not live:
                del self.live[request_id]

    @rule()
    def reset_prefix_cache(self) -> None:
        kv = self.scheduler.kv_cache_manager
        assert kv.reset_prefix_cache() == (not kv.req_to_blocks)

    @invariant()
    def ledger_holds(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.has_unfinished_requests() == bool(self.live)

    def teardown(self) -> None:
        for _ in range(5000):
            if not self.live:
                break
            self._step()
        assert not self.live, "a request never ends"
        if self.in_flight is not None:
            self.update()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.num_free_blocks == pool.num_usable_blocks
        host_pool = self.scheduler.kv_cache_manager.host_blocks.block_pool
        assert host_pool is None or host_pool.num_free_blocks == host_pool.num_usable_blocks

    def _step(self) -> None:
        if self.in_flight is None and self.live:
            self.schedule()
        if self.in_flight is not None:
            self.update()
            self.scheduler.check_integrity()

    def _check_end(self, request_id: str, tokens: list[int], finish_reason: str) -> None:
        num_prompt_tokens, max_tokens = self.limits[request_id]
        longest = min(max_tokens, self.max_model_len - num_prompt_tokens)
        if finish_reason == "stop":
            assert tokens[-1] in (2, 4) and len(tokens) <= longest
        else:
            assert finish_reason == "length" and len(tokens) == longest
        assert not {2, 4} & set(tokens[:-1]), "tokens after a stop"
        assert self.num_prompt_logprobs[request_id] == num_prompt_tokens - 1


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
