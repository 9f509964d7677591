"""RayWorker: what a RayDistributedExecutor runs on each host. An ordinary class; Ray makes an actor of it."""

import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from jaxllm.executor.worker_wrapper import Failure, WorkerWrapper, without_device_counts


class Whereabouts(NamedTuple):
    """Where an actor has come to be."""

    pid: int
    tpu_worker_id: int  # of its host in a TPU slice, which JAX counts its processes by; 0 elsewhere
    free_port: int


class RayWorker:
    """Its calls come one at a time, `ping` beside them on a thread of its own."""

    def __init__(self) -> None:
        self._wrapper: WorkerWrapper | None = None

    def whereabouts(self) -> Whereabouts:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return Whereabouts(os.getpid(), int(os.environ.get("TPU_WORKER_ID") or 0), port)

    def be_rank(self, rank: int, num_workers: int) -> None:
        """Takes its place among the workers. Ray shows each actor its own devices, so it is the first of its host."""
        environment = without_device_counts(os.environ)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        self._wrapper = WorkerWrapper(rank, 0, num_workers)

    def call(self, method: str, arguments: Sequence[bytes]) -> list[bytes] | Failure:
        """Runs a method of the worker; see WorkerWrapper.execute_method."""
        assert self._wrapper is not None
        result = self._wrapper.execute_method(method, arguments)
        return result if isinstance(result, Failure) else [bytes(frame) for frame in result]

    def ping(self) -> None:
        """Shows that the process isn't frozen."""
