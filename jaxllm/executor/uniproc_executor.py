"""UniProcExecutor: one worker, in this process. Imports the device side only when it is initialized."""

import importlib
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.exceptions import EngineDeadError, JaxllmError
from jaxllm.executor.executor import WORKER_CLASS, Executor, FailureCallback, WorkerProtocol
from jaxllm.executor.worker_wrapper import failure_of, find_method
from jaxllm.messages import KVCacheInfo, ModelRunnerOutput, SchedulerOutput


class UniProcExecutor(Executor):
    """Runs the worker by plain calls. Its failures are the exceptions of those calls.

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
        return self._living_worker().execute_model(scheduler_output)

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), returns: Any = None, timeout_s: float | None = None
    ) -> list[Any]:
        try:
            return [find_method(self._living_worker(), method)(*args)]
        except JaxllmError:
            raise
        except Exception as error:
            raise EngineDeadError(failure_of(0, method, error).message) from error

    def check_health(self) -> None:
        self._living_worker()

    def register_failure_callback(self, callback: FailureCallback) -> None:
        pass  # this process fails with its worker

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    def _living_worker(self) -> WorkerProtocol:
        if self._worker is None:
            raise EngineDeadError("the worker isn't running: it was never initialized, or was shut down")
        return self._worker
