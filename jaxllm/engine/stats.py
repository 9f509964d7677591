"""StatsCollector: what requests cost in time and tokens, from what the engine core says about them.

Knows requests and steps; where the numbers go (Prometheus, a log line) is the sinks' business. Times are seconds of the
monotonic clock, which all processes of one machine share.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from jaxllm.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    KVCacheInfo,
    SchedulerStats,
    StepInfo,
)
from jaxllm.outputs import RequestOutput


def total_stats(stats: Iterable[SchedulerStats]) -> SchedulerStats:
    """Adds up the counters and gauges of at least one engine core."""
    columns = zip(*(msgspec.structs.astuple(one) for one in stats), strict=True)
    return SchedulerStats(*(sum(column) for column in columns))


def idle_stats(info: KVCacheInfo) -> SchedulerStats:
    """Returns the counters and gauges of an engine core before its first step."""
    num_host_blocks = max(info.num_host_blocks - 1, 0)  # block 0 is nobody's, here as there
    return SchedulerStats(0, 0, info.num_device_blocks - 1, 0, 0, 0, 0, num_free_host_blocks=num_host_blocks)


class LatestStats:
    """The counters after each engine core's latest step."""

    def __init__(self, kv_cache_infos: Iterable[KVCacheInfo]) -> None:
        self._stats = [idle_stats(info) for info in kv_cache_infos]
        self._has_stepped = False

    def update(self, outputs: EngineCoreOutputs) -> None:
        """A step's news came."""
        self._stats[outputs.engine_index] = outputs.stats
        self._has_stepped = True

    def total(self) -> SchedulerStats | None:
        """Returns those of all cores together, None before the first step of any."""
        return total_stats(self._stats) if self._has_stepped else None


@dataclass(slots=True)
class StepStats:
    """What one step gave to requests."""

    num_prompt_tokens: int = 0  # of prompts whose first token came
    num_cached_tokens: int = 0  # of those, found in the prefix cache
    num_generated_tokens: int = 0
    times_to_first_token_s: list[float] = field(default_factory=list)
    inter_token_latencies_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class FinishedRequest:
    """One request's life. Parts that never came are None: a request may end before its first token.

    Attributes:
      finish_reason: "stop", "length" or "abort".
      engine_index: Who computed it; 0 for one that nobody has heard of.
      queue_s: From arrival until its first token was given to the model.
      prefill_s: From there to its first generated token.
      decode_s: From there to its last one.
      num_generated_tokens: Of all of its sequences.
      max_num_generated_tokens: Of its longest sequence.
    """

    finish_reason: str
    e2e_s: float
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    max_num_generated_tokens: int
    n: int
    max_tokens: int
    engine_index: int = 0

    @property
    def inference_s(self) -> float | None:
        if self.prefill_s is None or self.decode_s is None:
            return None
        return self.prefill_s + self.decode_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean time between tokens of the longest sequence; None if it has but one."""
        if self.decode_s is None or self.max_num_generated_tokens < 2:
            return None
        return self.decode_s / (self.max_num_generated_tokens - 1)


class StatsSink(Protocol):
    """Where the numbers go. Called on the event loop, so it must be quick."""

    def observe_step(
        self, step: StepStats, scheduler: SchedulerStats, info: StepInfo | None, engine_index: int
    ) -> None: ...

    def observe_finished(self, request: FinishedRequest) -> None: ...


class StatsCollector:
    """Follows each live request by the engine core's id. The engine calls it at every turn of a request's life."""

    def __init__(self, sinks: Sequence[StatsSink]) -> None:
        self._sinks = sinks
        self._requests: dict[str, _Life] = {}

    def added(self, request: EngineCoreRequest) -> None:
        """A request is about to be sent to the core."""
        self._requests[request.request_id] = _Life(request)

    def stepped(self, outputs: EngineCoreOutputs, now_s: float) -> None:
        """A step's news came."""
        step = StepStats()
        for news in outputs.outputs:
            life = self._requests.get(news.request_id)
            if life is not None:
                life.update(news, now_s, step, outputs.engine_index)
        for sink in self._sinks:
            sink.observe_step(step, outputs.stats, outputs.step, outputs.engine_index)

    def ended(self, core_id: str, output: RequestOutput | None, now_s: float) -> None:
        """A request is over: with its last output, or without one if its reader gave it up. Unknown ids are ignored."""
        life = self._requests.pop(core_id, None)
        if life is None:
            return
        finished = life.finished(output, now_s)
        for sink in self._sinks:
            sink.observe_finished(finished)

    def refused(self, core_id: str) -> None:
        """A request never ran. Unknown ids are ignored."""
        self._requests.pop(core_id, None)


class _Life:
    """One request's times and counts so far."""

    __slots__ = (
        "_request",
        "_first_scheduled_s",
        "_first_token_s",
        "_last_token_s",
        "_num_cached",
        "_num_generated",
        "_engine_index",
    )

    def __init__(self, request: EngineCoreRequest) -> None:
        self._request = request
        self._first_scheduled_s: float | None = None
        self._first_token_s: float | None = None
        self._last_token_s = 0.0
        self._num_cached = 0
        self._num_generated = 0
        self._engine_index = 0

    def update(self, news: EngineCoreOutput, now_s: float, step: StepStats, engine_index: int) -> None:
        self._engine_index = engine_index
        self._first_scheduled_s = news.first_scheduled_time_s
        num_sequences = num_tokens = 0
        for sequence in news.sequences:
            if sequence.new_tokens:
                num_sequences += 1
                num_tokens += len(sequence.new_tokens)
        if not num_tokens:
            return
        if self._first_token_s is None:
            self._first_token_s = now_s
            self._num_cached = news.num_cached_tokens
            step.times_to_first_token_s.append(now_s - self._request.arrival_time_s)
            step.num_prompt_tokens += len(self._request.prompt_token_ids)
            step.num_cached_tokens += news.num_cached_tokens
        else:
            step.inter_token_latencies_s += [now_s - self._last_token_s] * num_sequences
        self._last_token_s = now_s
        self._num_generated += num_tokens
        step.num_generated_tokens += num_tokens

    def finished(self, output: RequestOutput | None, now_s: float) -> FinishedRequest:
        request, scheduled_s, first_s = self._request, self._first_scheduled_s, self._first_token_s
        lens = [] if output is None else [len(sequence.token_ids) for sequence in output.outputs]
        reason = None if output is None else output.outputs[0].finish_reason
        return FinishedRequest(
            finish_reason=reason or "abort",
            e2e_s=now_s - request.arrival_time_s,
            queue_s=None if scheduled_s is None else scheduled_s - request.arrival_time_s,
            prefill_s=None if scheduled_s is None or first_s is None else first_s - scheduled_s,
            decode_s=None if first_s is None else self._last_token_s - first_s,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=self._num_cached,
            num_generated_tokens=sum(lens) if lens else self._num_generated,
            max_num_generated_tokens=max(lens) if lens else self._num_generated,
            n=request.sampling_params.n,
            max_tokens=request.max_tokens,
            engine_index=self._engine_index,
        )
