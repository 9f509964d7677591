"""A log line every ten seconds while the engine is busy, as vLLM writes it. Implements StatsSink."""

import time
from collections.abc import Callable

from jaxllm.engine.stats import FinishedRequest, StepStats
from jaxllm.logger import get_logger
from jaxllm.messages import KVCacheInfo, SchedulerStats, StepInfo

INTERVAL_S = 10.0
_logger = get_logger(__name__)


class IntervalLog:
    """Adds up what happens between two lines.

    Args:
      kv_cache_info: What the engine allocated.
      clock: Seconds of a monotonic clock.
    """

    def __init__(self, kv_cache_info: KVCacheInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_blocks = kv_cache_info.num_device_blocks - 1
        self._clock = clock
        self._stats: SchedulerStats | None = None
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._since_s = clock()
        self._cache_counts = (0, 0)  # tokens looked up and found, until the last line

    def observe_step(self, step: StepStats, scheduler: SchedulerStats, info: StepInfo | None) -> None:
        self._stats = scheduler
        self._num_prompt_tokens += step.num_prompt_tokens
        self._num_generated_tokens += step.num_generated_tokens

    def observe_finished(self, request: FinishedRequest) -> None:
        pass  # rates and gauges say enough

    def write(self) -> None:
        """Writes the line, unless nothing has happened since the last one and nothing runs."""
        line = self._line()
        if line is not None:
            _logger.info("%s", line)

    def _line(self) -> str | None:
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
            f"Engine 000: Avg prompt throughput: {num_prompt / elapsed_s:.1f} tokens/s, "
            f"Avg generation throughput: {num_generated / elapsed_s:.1f} tokens/s, "
            f"Running: {stats.num_running} reqs, Waiting: {stats.num_waiting} reqs, "
            f"KV cache usage: {100 * (1 - stats.num_free_blocks / self._num_blocks):.1f}%, "
            f"Prefix cache hit rate: {100 * num_found / max(num_looked_up, 1):.1f}%"
        )
