"""WorkerWrapper: makes one rank's worker and runs its methods by name. Knows no ring, no process and no device.

A method's arguments and value are frames of bytes here; the annotations of the method say what they hold.
"""

import importlib
import inspect
import os
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxllm.engine.serialization import DecodeError, Frame, MessageDecoder, MessageEncoder
from jaxllm.exceptions import ConfigError, DeviceError, EngineDeadError, JaxllmError
from jaxllm.executor.rpc_messages import StartWorker
from jaxllm.logger import get_logger

_logger = get_logger(__name__)

_DISTRIBUTED = "sharding.distributed"


class Failure(NamedTuple):
    error: str  # the name of one of our exceptions
    message: str


class _Method(NamedTuple):
    function: Callable[..., Any]
    arguments: MessageDecoder[tuple[Any, ...]]


class WorkerWrapper:
    """The one place that knows which rank this is.

    Args:
      rank: Of this worker among all.
      local_rank: Of this worker among those of its machine.
      num_workers: Of the whole job.
    """

    def __init__(self, rank: int, local_rank: int, num_workers: int) -> None:
        self.rank = rank
        self._local_rank = local_rank
        self._num_workers = num_workers
        self._worker: Any = None  # of whatever class the first call names
        self._methods: dict[str, _Method] = {}
        self._encoder = MessageEncoder()
        self._is_distributed = False
        self.update_environment_variables(
            {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(num_workers)}
        )

    def update_environment_variables(self, values: dict[str, str]) -> None:
        os.environ.update(values)

    def init_worker(self, start: StartWorker) -> None:
        """Joins the other workers' job and makes the worker.

        Raises:
          ConfigError: The workers have other devices than the configuration asks for.
          DeviceError: The workers can't be joined.
        """
        if start.coordinator is not None:
            join_job(start, self._num_workers, self.rank, self._local_rank)
            self._is_distributed = True
        self._worker = make_worker(start)

    def shutdown(self) -> None:
        """Lets go of the devices, and leaves the job as soon as all others do."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
        if self._is_distributed:
            importlib.import_module(_DISTRIBUTED).shutdown()
            self._is_distributed = False

    def execute_method(self, name: str, arguments: Sequence[Frame]) -> list[Frame] | Failure:
        """Runs a public method of the worker, or one of ours, and returns the frames of its value."""
        try:
            method = self._methods.get(name)
            if method is None:
                method = self._methods[name] = self._find(name)
            return self._encoder.encode(method.function(*method.arguments.decode(arguments)))
        except Exception as error:
            if not isinstance(error, JaxllmError | DecodeError | LookupError):
                _logger.exception("worker %d failed at %s", self.rank, name)
            return failure_of(self.rank, name, error)

    def _find(self, name: str) -> _Method:
        function = find_method(self if name in _OWN_METHODS else self._worker, name)
        hints = typing.get_type_hints(function)
        types = tuple(hints[parameter] for parameter in inspect.signature(function).parameters)
        return _Method(function, MessageDecoder(tuple.__class_getitem__(types)))


_OWN_METHODS = ("init_worker", "shutdown", "update_environment_variables")


def find_method(owner: Any, name: str) -> Callable[..., Any]:
    """Returns an object's public method.

    Raises:
      LookupError: It has none by that name.
    """
    method = None if name.startswith("_") else getattr(owner, name, None)
    if not inspect.ismethod(method):
        raise LookupError("there is no such method")
    return method


def failure_of(rank: int, name: str, error: Exception) -> Failure:
    """Returns how an error of a method is told. Ours go as they are."""
    if isinstance(error, JaxllmError):
        return Failure(type(error).__name__, str(error))
    text = (str(error).splitlines() or [""])[0]
    return Failure(EngineDeadError.__name__, f"worker {rank} failed at {name}: {type(error).__name__}: {text}")


def join_job(start: StartWorker, num_processes: int, rank: int, local_rank: int) -> None:
    """Makes this process one of the job's, and checks that the job has the devices that it needs.

    Raises:
      ConfigError: It has others.
      DeviceError: The other processes don't come, or a device can't be used.
    """
    distributed = importlib.import_module(_DISTRIBUTED)  # brings JAX with it
    count = start.num_local_devices
    first = start.first_device + local_rank * count
    try:
        distributed.initialize(start.coordinator, num_processes, rank, range(first, first + count))
        num_devices = distributed.num_devices()
    except RuntimeError as error:
        text = (str(error).splitlines() or [""])[0]
        raise DeviceError(f"process {rank} can't join the job at {start.coordinator}: {text:.300}") from error
    parallel = start.config.parallel
    if num_devices != parallel.world_size:
        raise ConfigError(
            f"tensor_parallel_size x pipeline_parallel_size must be the number of devices, got "
            f"{parallel.tensor_parallel_size} x {parallel.pipeline_parallel_size} and {num_devices} in "
            f"{num_processes} processes; set --tensor-parallel-size"
        )


def make_worker(start: StartWorker) -> Any:
    """Returns a worker of the class that `start` names."""
    module_name, class_name = start.worker_class.split(":")
    return vars(importlib.import_module(module_name))[class_name](start.config)
