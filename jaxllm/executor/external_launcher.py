"""ExecutorWithExternalLauncher: somebody else has started every rank, each with an engine of its own.

The launcher says who is who by torchrun's variables: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. Nothing
is sent from rank to rank but what the model's programs exchange: all ranks must add the same requests in the same
order, and their schedulers must come to the same steps by themselves. What would let them differ is refused.
"""

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxllm.config import EngineConfig
from jaxllm.exceptions import ConfigError
from jaxllm.executor.executor import WORKER_CLASS, Executor, FailureCallback
from jaxllm.executor.rpc_messages import StartWorker
from jaxllm.executor.uniproc_executor import UniProcExecutor
from jaxllm.executor.worker_wrapper import DISTRIBUTED, join_job
from jaxllm.messages import KVCacheInfo, ModelRunnerOutput, SchedulerOutput

_STANDARD_OUTPUT, _STANDARD_ERROR = 1, 2


class LauncherEnvironment(NamedTuple):
    """What the launcher says."""

    rank: int
    world_size: int  # processes
    local_rank: int  # among the processes of this machine
    coordinator: str  # where rank 0 waits for the others

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "LauncherEnvironment":
        """Raises ConfigError if it hasn't said everything."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if not environment.get(name)]
        if missing:
            raise ConfigError(
                f"distributed_executor_backend=external_launcher needs the launcher's {', '.join(names)}, "
                f"{missing[0]} isn't set; start every rank with torchrun or the like"
            )
        numbers = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
            if not environment[name].isdecimal():
                raise ConfigError(f"{name} must be a number, got {environment[name]!r}; the launcher sets it")
            numbers[name] = int(environment[name])
        rank, world_size = numbers["RANK"], numbers["WORLD_SIZE"]
        if rank >= world_size:
            raise ConfigError(f"RANK must be below WORLD_SIZE, got {rank} and {world_size}; the launcher sets them")
        address = f"{environment['MASTER_ADDR']}:{numbers['MASTER_PORT']}"
        return cls(rank, world_size, numbers["LOCAL_RANK"], address)


class ExecutorWithExternalLauncher(Executor):
    """This rank's worker, in this process.

    Args:
      config: The same on every rank.
      worker_class: "module:class" of the worker.

    Raises:
      ConfigError: The launcher or the configuration doesn't allow it.
    """

    def __init__(self, config: EngineConfig, worker_class: str = WORKER_CLASS) -> None:
        self._launcher = LauncherEnvironment.read(os.environ)
        _check(config, self._launcher.world_size)
        self._config = config
        self._worker_class = worker_class
        self._uni = UniProcExecutor(config, worker_class)

    def initialize(self) -> KVCacheInfo:
        launcher, parallel = self._launcher, self._config.parallel
        start = StartWorker(
            self._config,
            self._worker_class,
            launcher.coordinator,
            num_local_devices=parallel.world_size // launcher.world_size,
        )
        with _standard_output_kept_clean():
            join_job(start, launcher.world_size, launcher.rank, launcher.local_rank)
            info = self._uni.initialize()
            self._check_agreement(info)
        return info

    def _check_agreement(self, info: KVCacheInfo) -> None:
        # The worker has agreed with the others on its blocks; had it not, the schedulers would go different ways.
        distributed = importlib.import_module(DISTRIBUTED)
        for name, count in (("device", info.num_device_blocks), ("host", info.num_host_blocks)):
            least = distributed.agree_on_min(count)
            if distributed.agree_on_min(-count) != -least:
                raise ConfigError(
                    f"every rank must have the same KV cache, rank {self._launcher.rank} has {count} {name} blocks, "
                    "another one a different number; set --num-gpu-blocks-override"
                )

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        with _standard_output_kept_clean():
            return self._uni.execute_model(scheduler_output)

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), returns: Any = None, timeout_s: float | None = None
    ) -> list[Any]:
        """As the base class says, with one value: the other ranks' engines have theirs."""
        return self._uni.collective_rpc(method, args, returns, timeout_s)

    def check_health(self) -> None:
        self._uni.check_health()

    def register_failure_callback(self, callback: FailureCallback) -> None:
        self._uni.register_failure_callback(callback)

    def shutdown(self) -> None:
        """Leaves the job; waits a few seconds for the other ranks to do so too."""
        self._uni.shutdown()
        importlib.import_module(DISTRIBUTED).shutdown()


@contextlib.contextmanager
def _standard_output_kept_clean() -> Iterator[None]:
    """Sends what native code prints to standard error: gloo tells of each connection, in the middle of our text."""
    kept = os.dup(_STANDARD_OUTPUT)
    os.dup2(_STANDARD_ERROR, _STANDARD_OUTPUT)
    try:
        yield
    finally:
        os.dup2(kept, _STANDARD_OUTPUT)
        os.close(kept)


def _check(config: EngineConfig, num_processes: int) -> None:
    """Raises ConfigError for what would let the ranks' schedulers differ, and for sizes that don't match."""
    parallel = config.parallel
    if parallel.world_size % num_processes:
        raise ConfigError(
            f"tensor_parallel_size x pipeline_parallel_size must be a multiple of WORLD_SIZE={num_processes}, got "
            f"{parallel.tensor_parallel_size} x {parallel.pipeline_parallel_size}; set --tensor-parallel-size"
        )
    why = "with distributed_executor_backend=external_launcher every rank must schedule alike"
    if parallel.data_parallel_size > 1:
        raise ConfigError(f"{why}: data_parallel_size must be 1, got {parallel.data_parallel_size}")
    if config.scheduler.scheduler_delay_factor:
        delay = config.scheduler.scheduler_delay_factor
        raise ConfigError(f"{why}: scheduler_delay_factor measures time and must be 0, got {delay}")
    if config.seed is None:
        raise ConfigError(f"{why}: requests without a seed need the same one everywhere; set --seed")
