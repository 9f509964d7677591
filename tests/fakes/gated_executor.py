"""GatedExecutor: the alphabet, step by step: each step begins when the test lets it.

GatedExecutor.gate.release(3)  # three steps; the core must run in the test's process
"""

import threading

from jaxllm.messages import ModelRunnerOutput, SchedulerOutput
from tests.fakes.fake_cores import AlphabetExecutor

_PATIENCE_S = 300.0


class GatedExecutor(AlphabetExecutor):
    gate = threading.Semaphore(0)
    num_begun = 0  # steps that stand before the gate, or have passed it

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        GatedExecutor.num_begun += 1
        assert self.gate.acquire(timeout=_PATIENCE_S), "the test lets no step begin"
        return super().execute_model(scheduler_output)
