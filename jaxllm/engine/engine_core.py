"""EngineCore: add, abort, step. Knows no text, no socket and no process."""

import time
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from jaxllm import envs
from jaxllm.config import EngineConfig
from jaxllm.executor.executor import Executor
from jaxllm.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
    StepInfo,
)
from jaxllm.scheduler.scheduler import Scheduler


class EngineCore:
    """The loop's body: schedule, execute, update, return.

    Args:
      config: The engine's configuration.
      executor: Initialized here, shut down by shutdown().
      clock: Seconds of a monotonic clock.

    Attributes:
      is_on_device: Whether a step's results are being waited for.
    """

    def __init__(self, config: EngineConfig, executor: Executor, clock: Callable[[], float] = time.monotonic) -> None:
        self._executor = executor
        self._clock = clock
        self._is_debug = envs.is_debug()
        self.is_on_device = False
        self.kv_cache_info = executor.initialize()
        self.scheduler = Scheduler(config.scheduler, config.cache, self.kv_cache_info)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request.

        Raises:
          InvalidRequestError: This request can't run; the others aren't touched.
        """
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests without further output. Unknown and finished ids are ignored."""
        for request_id in request_ids:
            self.scheduler.abort_request(request_id)

    def finish_sequence(self, request_id: str, index: int) -> None:
        """Ends one sequence whose text holds a stop string, without further output. Idempotent."""
        self.scheduler.finish_sequence(request_id, index)

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix. Returns False, and does nothing, while a sequence holds blocks."""
        return self.scheduler.kv_cache_manager.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        """Returns the counters and gauges of this moment."""
        return self.scheduler.stats()

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def step(self) -> EngineCoreOutputs:
        """Runs one step. Call it only while there are unfinished requests.

        Raises:
          AssertionError: With JAXLLM_DEBUG=1, the scheduler's books are wrong now that it is idle.
        """
        start_s = self._clock()
        scheduler_output = self.scheduler.schedule(start_s)
        self.is_on_device = True
        runner_output = self._executor.execute_model(scheduler_output)
        self.is_on_device = False
        outputs = self.scheduler.update_from_output(scheduler_output, runner_output)
        info = _step_info(scheduler_output, runner_output, self._clock() - start_s)
        outputs = msgspec.structs.replace(outputs, step=info)
        if self._is_debug and not self.has_unfinished_requests():
            self.scheduler.check_integrity()
        return outputs

    def shutdown(self) -> None:
        self._executor.shutdown()


def _step_info(step: SchedulerOutput, output: ModelRunnerOutput, duration_s: float) -> StepInfo:
    counts = step.num_scheduled_tokens.values()
    num_single = sum(count == 1 for count in counts)  # a sequence that decodes has one token
    kind: Literal["prefill", "decode", "mixed"] = "mixed"
    if num_single in (0, len(counts)):
        kind = "decode" if num_single else "prefill"
    return StepInfo(kind, duration_s, sum(counts), output.num_padded_tokens, output.num_compiles)
