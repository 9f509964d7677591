"""A log line every ten seconds for each engine core that is busy, as vLLM writes it. Implements StatsSink."""

import time
from collections.abc import Callable, Sequence

from jaxllm.engine.stats import FinishedRequest, StepStats
from jaxllm.logger import get_logger
from jaxllm.messages import KVCacheInfo, SchedulerStats, StepInfo

INTERVAL_S = 10.0
_logger = get_logger(__name__)


class IntervalLog:
    """Adds up what happens between two lines.

    Args:
      kv_cache_infos: What each engine core allocated.
      clock: Seconds of a monotonic clock.
    """

    def __init__(self, kv_cache_infos: Sequence[KVCacheInfo], clock: Callable[[], float] = time.monotonic) -> None:
        self._engines = [_EngineLog(index, info, clock) for index, info in enumerate(kv_cache_infos)]

    def observe_step(
        self, step: StepStats, scheduler: SchedulerStats, info: StepInfo | None, engine_index: int
    ) -> None:
        self._engines[engine_index].observe_step(step, scheduler)

    def observe_finished(self, request: FinishedRequest) -> None:
        pass  # rates and gauges say enough

    def write(self) -> None:
        """Writes a line of each engine core, unless nothing has happened there since its last one and nothing runs."""
        for engine in self._engines:
            line = engine.line()
            if line is not None:
                _logger.info("%s", line)


class _EngineLog:
    """What one engine core did since its last line."""

    def __init__(self, engine_index: int, kv_cache_info: KVCacheInfo, clock: Callable[[], float]) -> None:
        self._engine_index = engine_index
        self._num_blocks = kv_cache_info.num_device_blocks - 1
        self._clock = clock
        self._stats: SchedulerStats | None = None
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._since_s = clock()
        self._cache_counts = (0, 0)  # tokens looked up and found, until the last line

    def observe_step(self, step: StepStats, scheduler: SchedulerStats) -> None:
        self._stats = scheduler
        self._num_prompt_tokens += step.num_prompt_tokens
        self._num_generated_tokens += step.num_generated_tokens

    def line(self) -> str | None:
        """Returns the line, None if there is nothing to say. Begins anew."""
        elapsed_s = max(self._clock() - self._since_s, 1e-9)
        stats, num_prompt, num_generated = self._stats, self._num_prompt_tokens, self._num_generated_tokens
        self._num_prompt_tokens = self._num_generated_tokens = 0
        self._since_s += elapsed_s
        if stats is None or not (num_prompt or num_generated or stats.num_running or stats.num_waiting):
            return None
        queries, hits = stats.prefix_cache_queries, stats.prefix_cache_hits
        num_looked_up, num_found = queries - self._cache_counts[0], hits - self._cache_counts[1]
        self._cache_counts = (queries, hits)
        return (
            f"Engine {self._engine_index:03d}: Avg prompt throughput: {num_prompt / elapsed_s:.1f} tokens/s, "
            f"Avg generation throughput: {num_generated / elapsed_s:.1f} tokens/s, "
            f"Running: {stats.num_running} reqs, Waiting: {stats.num_waiting} reqs, "
            f"KV cache usage: {100 * (1 - stats.num_free_blocks / self._num_blocks):.1f}%, "
            f"Prefix cache hit rate: {100 * num_found / max(num_looked_up, 1):.1f}%"
        )
