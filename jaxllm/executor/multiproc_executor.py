"""MultiprocExecutor: one worker process a device of this machine, which together form one jax.distributed job.

Every worker gets every call, in the same order. Knows neither what a ring looks like nor how a process is watched;
worker_group.py does.
"""

import dataclasses
import functools
import itertools
import socket
import threading
import weakref
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.engine.serialization import MessageDecoder, MessageEncoder
from jaxllm.exceptions import EngineDeadError, JaxllmError, from_name
from jaxllm.executor.executor import WORKER_CLASS, Executor, FailureCallback
from jaxllm.executor.failure_notice import FailureNotice
from jaxllm.executor.ranks import output_rank, same_everywhere
from jaxllm.executor.rpc_messages import FromWorker, RpcCall, RpcHello, RpcProgress, RpcReply, StartWorker
from jaxllm.executor.shm_broadcast import AlarmError, Frame, Patience, RingReader
from jaxllm.executor.worker_group import WorkerGroup
from jaxllm.messages import KVCacheInfo, ModelRunnerOutput, SchedulerOutput
from jaxllm.progress import report_progress

DEFAULT_NUM_CHUNKS = 10
DEFAULT_CHUNK_BYTES = 10 << 20

_START_TIMEOUT_S = 600.0  # until a process has imported what it needs; until all have met
_LOAD_TIMEOUT_S = 7200.0
_STEP_TIMEOUT_S = 600.0  # nothing is compiled any more; the largest steps take seconds
_OBITUARY_S = 1.0  # one worker's error may come of another one's death, which is told a moment later


class MultiprocExecutor(Executor):
    """Starts its workers in initialize(), and ends all of them when one fails.

    Args:
      config: Of the engine; there are parallel.world_size workers.
      worker_class: "module:class" of the worker.
      forms_job: Whether the workers form a jax.distributed job. Those that don't use JAX need none.
      num_chunks, chunk_bytes: Of the rings. Larger messages go through a socket.
    """

    def __init__(
        self,
        config: EngineConfig,
        worker_class: str = WORKER_CLASS,
        forms_job: bool = True,
        num_chunks: int = DEFAULT_NUM_CHUNKS,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        self._config = config
        self._worker_class = worker_class
        self._forms_job = forms_job
        self._ring_size = (num_chunks, chunk_bytes)
        self._notice = FailureNotice()
        self._output_rank = output_rank(config.parallel, config.parallel.world_size)
        self._group: WorkerGroup | None = None
        self._call_ids = itertools.count()
        self._encoder = MessageEncoder()
        self._from_worker: MessageDecoder[FromWorker] = MessageDecoder(FromWorker)
        self._lock = threading.Lock()  # one call at a time

    def initialize(self) -> KVCacheInfo:
        self._group = WorkerGroup(self._config.parallel.world_size, *self._ring_size, self._notice.tell)
        self._finalizer = weakref.finalize(self, self._group.shutdown)
        try:
            self._wait_for_hellos(self._group)
            self.collective_rpc("init_worker", (self._start_message(),), timeout_s=_START_TIMEOUT_S)
            return same_everywhere(self.collective_rpc("initialize", (), KVCacheInfo, _LOAD_TIMEOUT_S))
        except TimeoutError as error:
            self.shutdown()
            raise EngineDeadError(f"the workers don't start: {error}") from error
        except BaseException:  # Ctrl-C too
            self.shutdown()
            raise

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        try:
            values = self._call("execute_model", (scheduler_output,), ModelRunnerOutput, _STEP_TIMEOUT_S, True)
        except TimeoutError as error:
            raise EngineDeadError(str(error)) from error
        result = values[0]
        assert isinstance(result, ModelRunnerOutput)
        return result

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), returns: Any = None, timeout_s: float | None = None
    ) -> list[Any]:
        return self._call(method, args, returns, timeout_s, False)

    def check_health(self) -> None:
        self._living_group()

    def register_failure_callback(self, callback: FailureCallback) -> None:
        self._notice.register(callback)

    def shutdown(self) -> None:
        if self._group is not None:
            self._finalizer()

    def _living_group(self) -> WorkerGroup:
        if self._group is None or not self._finalizer.alive:
            raise EngineDeadError("the workers aren't running: they were never initialized, or were shut down")
        if self._group.failure is not None:
            raise EngineDeadError(self._group.failure)
        return self._group

    def _start_message(self) -> StartWorker:
        """Returns what the workers are made from: a job of their own, without the other data parallel replicas."""
        parallel = self._config.parallel
        alone = dataclasses.replace(parallel, data_parallel_size=1, data_parallel_rank=None)
        return StartWorker(
            dataclasses.replace(self._config, parallel=alone),
            self._worker_class,
            f"127.0.0.1:{_free_port()}" if self._forms_job else None,
            num_local_devices=1,
            first_device=(parallel.data_parallel_rank or 0) * parallel.world_size,
        )

    def _wait_for_hellos(self, group: WorkerGroup) -> None:
        patience = Patience(_START_TIMEOUT_S, group.alarm)
        for response in group.responses:
            try:
                head, _ = self._read(response, patience)
            except (AlarmError, EOFError):
                raise self._death(group) from None
            assert isinstance(head, RpcHello)

    def _call(
        self, method: str, args: tuple[Any, ...], returns: Any, timeout_s: float | None, has_one_reply: bool
    ) -> list[Any]:
        with self._lock:
            group = self._living_group()
            patience = Patience(timeout_s, group.alarm)
            call = RpcCall(next(self._call_ids), method, self._output_rank if has_one_reply else None)
            try:
                head, body = self._encoder.encode(call), self._encoder.encode(args)
                group.broadcast.write([*head, *body], patience)
                return self._gather(group, call, returns, patience)
            except TimeoutError as error:
                raise TimeoutError(f"the workers haven't answered {method}: {error}") from None
            except (AlarmError, ConnectionError, EOFError):
                raise self._death(group) from None

    def _gather(self, group: WorkerGroup, call: RpcCall, returns: Any, patience: Patience) -> list[Any]:
        """Waits for the replies to a call, and returns their values by rank. The first failure ends it."""
        awaited = set(range(len(group.responses))) if call.output_rank is None else {call.output_rank}
        values: dict[int, Any] = {}
        while len(values) < len(awaited):
            # Whoever doesn't reply when all is well may fail all the same.
            silent = [response for rank, response in enumerate(group.responses) if rank not in values]
            ready = set(patience.wait([response.fileno() for response in silent]))
            for rank, response in enumerate(group.responses):
                if response.fileno() not in ready:
                    continue
                head, body = self._read(response, patience)
                if isinstance(head, RpcProgress) and rank == min(awaited):
                    report_progress(head.phase, head.percent, head.eta_s)
                if not isinstance(head, RpcReply) or head.call_id != call.call_id:
                    continue  # of a call that nobody waits for any more
                if head.error is not None:
                    raise self._error(group, head.error, head.message)
                values[rank] = _decoder(returns).decode(body)
        return [values[rank] for rank in sorted(values)]

    def _read(self, response: RingReader, patience: Patience) -> tuple[FromWorker, list[Frame]]:
        frames = response.read(patience)
        return self._from_worker.decode(frames[:1]), frames[1:]

    def _error(self, group: WorkerGroup, name: str, message: str) -> JaxllmError:
        """Returns what a worker's failure is raised as."""
        error = from_name(name, message)
        if isinstance(error, EngineDeadError):
            return EngineDeadError(group.wait_failure(_OBITUARY_S) or message)
        return error

    def _death(self, group: WorkerGroup) -> EngineDeadError:
        return EngineDeadError(group.wait_failure(_OBITUARY_S) or "the workers were shut down")


@functools.cache
def _decoder(value_type: Any) -> MessageDecoder[Any]:
    return MessageDecoder(value_type)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
