"""Executor: the engine's only way to a device. Knows neither how many workers there are nor what they do."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from jaxllm.config import EngineConfig
from jaxllm.messages import KVCacheInfo, ModelRunnerOutput, SchedulerOutput

WORKER_CLASS = "jaxllm.worker.worker:Worker"
# Is told, on any thread, why the workers can't go on.
FailureCallback = Callable[[str], None]


class WorkerProtocol(Protocol):
    """What an executor asks of a worker; its constructor takes the configuration."""

    def initialize(self) -> KVCacheInfo: ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput: ...

    def shutdown(self) -> None: ...


class Executor(ABC):
    """Call initialize() once, then execute_model() step by step, then shutdown() once."""

    @abstractmethod
    def initialize(self) -> KVCacheInfo:
        """Loads the model, allocates the KV cache, warms up.

        Raises:
          ModelLoadError: The model can't be found, read or understood.
          ConfigError: Memory, the devices or an engine argument don't allow it.
          DeviceError: A device can't be used.
          EngineDeadError: A worker has ended.
        """

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step on every worker and waits for its results, which one of them gives.

        Raises:
          EngineDeadError: A worker has failed, or ended.
        """

    @abstractmethod
    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), returns: Any = None, timeout_s: float | None = None
    ) -> list[Any]:
        """Runs a method of every worker and returns their values, by rank. Call it between steps.

        Args:
          method: A public method's name. Where workers are other processes, its annotations say what its arguments
            are decoded as.
          args: What it is called with.
          returns: The type of its value.
          timeout_s: How long to wait for all of them; None waits for ever, as long as they live.

        Raises:
          EngineDeadError: A worker has ended, or the method failed with an error that isn't ours.
          JaxllmError: The method failed with this error.
          TimeoutError: A worker hasn't answered in time.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Returns if the workers live.

        Raises:
          EngineDeadError: They don't, or not all of them.
        """

    @abstractmethod
    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Has a failure of the workers told at once, though nobody waits for them. At once, too, if it has happened."""

    @abstractmethod
    def shutdown(self) -> None:
        """Gives up the device. Idempotent."""


def make_executor(config: EngineConfig) -> Executor:
    """Returns a new executor of the class that the configuration names; its constructor takes the configuration."""
    module_name, class_name = config.executor_class.split(":")
    executor = vars(importlib.import_module(module_name))[class_name](config)
    assert isinstance(executor, Executor)
    return executor
