"""Executor: the engine's only way to a device. Knows neither how many workers there are nor what they do."""

import importlib
from abc import ABC, abstractmethod

from jaxllm.config import EngineConfig
from jaxllm.messages import KVCacheInfo, ModelRunnerOutput, SchedulerOutput


class Executor(ABC):
    """Call initialize() once, then execute_model() step by step, then shutdown() once."""

    @abstractmethod
    def initialize(self) -> KVCacheInfo:
        """Loads the model, allocates the KV cache, warms up.

        Raises:
          ModelLoadError: The model can't be found, read or understood.
          ConfigError: Memory or an engine argument doesn't allow a KV cache.
        """

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step and waits for its results."""

    @abstractmethod
    def shutdown(self) -> None:
        """Gives up the device. Idempotent."""


def make_executor(config: EngineConfig) -> Executor:
    """Returns a new executor of the class that the configuration names; its constructor takes the configuration."""
    module_name, class_name = config.executor_class.split(":")
    executor = vars(importlib.import_module(module_name))[class_name](config)
    assert isinstance(executor, Executor)
    return executor
