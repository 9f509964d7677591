"""UniProcExecutor: one worker, in this process. Imports the device side only when it is initialized."""

import importlib
from typing import Protocol

from jaxllm.config import EngineConfig
from jaxllm.exceptions import EngineDeadError
from jaxllm.executor.executor import Executor
from jaxllm.messages import KVCacheInfo, ModelRunnerOutput, SchedulerOutput

WORKER_CLASS = "jaxllm.worker.worker:Worker"


class WorkerProtocol(Protocol):
    """What an executor asks of a worker."""

    def initialize(self) -> KVCacheInfo: ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput: ...

    def shutdown(self) -> None: ...


class UniProcExecutor(Executor):
    """Runs the worker by plain calls.

    Args:
      config: Handed to the worker's constructor.
      worker_class: "module:class" of the worker.
    """

    def __init__(self, config: EngineConfig, worker_class: str = WORKER_CLASS) -> None:
        self._config = config
        self._worker_class = worker_class
        self._worker: WorkerProtocol | None = None

    def initialize(self) -> KVCacheInfo:
        module_name, class_name = self._worker_class.split(":")
        self._worker = vars(importlib.import_module(module_name))[class_name](self._config)
        return self._worker.initialize()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        if self._worker is None:
            raise EngineDeadError("the worker isn't running: it was never initialized, or was shut down")
        return self._worker.execute_model(scheduler_output)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
