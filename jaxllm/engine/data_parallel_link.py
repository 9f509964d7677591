"""DataParallelLink: one line to several replicas of the engine core. To its client they are one core.

A request goes to the replica that replica_balancer.py chooses, and what concerns it goes there too; questions go to
all. Replicas share nothing: when one of them dies, so does the engine, and every stream ends with the same error.

Where they run: in one core process, each on a thread of it, as an accelerator host's chips have a single owner; in a
core process each, where executors are asked for that leave the devices to processes of their own; or on threads of
this process.
"""

import threading
from collections.abc import Callable, Iterable

import msgspec

from jaxllm.config import EngineConfig
from jaxllm.engine.core_link import CoreLink, OnMessage
from jaxllm.engine.core_messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    FinishSequence,
    FromCore,
    Hello,
    LoadProgress,
    Pulse,
    Ready,
    ShutDown,
    StartEngine,
    ToCore,
    ToReplica,
    UtilityCall,
    UtilityResult,
    UtilityValue,
)
from jaxllm.engine.core_process import CoreProcess
from jaxllm.engine.core_runner import ReplicaThreads
from jaxllm.engine.replica_balancer import ReplicaBalancer
from jaxllm.exceptions import ConfigError
from jaxllm.messages import EngineCoreOutputs, KVCacheInfo

# Starts all replicas and returns a link to each; links may be the same object.
ConnectReplicas = Callable[[EngineConfig, OnMessage], list[CoreLink]]

_BACKENDS_WITHOUT_DEVICES = ("mp", "ray")  # their core process owns none, so there may be several


class DataParallelLink:
    """A CoreLink.

    Args:
      config: Of the engine.
      on_message: Takes what the replicas say, one message at a time, with their engine_index.
      connect: Starts the replicas.
    """

    def __init__(self, config: EngineConfig, on_message: OnMessage, connect: ConnectReplicas) -> None:
        self._config = config
        self._on_message = on_message
        self._size = config.parallel.data_parallel_size
        # Guards everything below. The collector may call shutdown in a thread that holds it.
        self._lock = threading.RLock()
        self._infos: dict[int, KVCacheInfo] = {}  # of the replicas that are ready
        self._balancer: ReplicaBalancer | None = None  # once all are
        self._results: dict[int, dict[int, UtilityValue]] = {}  # by call id, then by replica
        self._has_ended = False
        self._links: list[CoreLink] = []
        self._links = connect(config, self._receive)
        if self._has_ended:
            self._stop_all()

    def send(self, message: ToCore) -> None:
        """Sends without waiting. Does nothing once a replica has gone.

        Raises:
          TypeError, ValueError, OverflowError: The message can't be encoded.
        """
        with self._lock:
            match message:
                case AddRequest():
                    self._add(message)
                case AbortRequests():
                    self._abort(message.request_ids)
                case FinishSequence():
                    self._finish_sequence(message)
                case UtilityCall():
                    self._results[message.call_id] = {}
                    for index in range(self._size):
                        self._send_to(index, message)
                case ShutDown():
                    self._stop_all()
                case StartEngine():
                    raise AssertionError("replicas are started by their own links")

    def shutdown(self) -> None:
        """Ends the replicas and waits until they have gone, a few seconds at most. Idempotent."""
        self._stop_all()  # all begin at once
        for link in dict.fromkeys(self._links):
            link.shutdown()

    def _add(self, message: AddRequest) -> None:
        balancer = self._ready_balancer()
        index = balancer.place(message.request)
        try:
            self._send_to(index, message)
        except BaseException:
            balancer.remove(message.request.request_id)
            raise

    def _abort(self, request_ids: Iterable[str]) -> None:
        balancer = self._ready_balancer()
        by_engine: dict[int, list[str]] = {}
        for request_id in request_ids:
            index = balancer.engine_of(request_id)
            if index is not None:
                by_engine.setdefault(index, []).append(request_id)
                balancer.remove(request_id)
        for index, ids in by_engine.items():
            self._send_to(index, AbortRequests(ids))

    def _finish_sequence(self, message: FinishSequence) -> None:
        balancer = self._ready_balancer()
        index = balancer.engine_of(message.request_id)
        if index is not None:
            balancer.finish_sequence(message.request_id, message.index)
            self._send_to(index, message)

    def _ready_balancer(self) -> ReplicaBalancer:
        assert self._balancer is not None, "no request before Ready"
        return self._balancer

    def _send_to(self, index: int, message: ToReplica) -> None:
        self._links[index].send(msgspec.structs.replace(message, engine_index=index))

    def _stop_all(self) -> None:
        for link in dict.fromkeys(self._links):
            link.send(ShutDown())

    def _receive(self, message: FromCore) -> None:
        """Takes a message of any replica, on its link's thread, and passes on what the client should see."""
        with self._lock:  # held while the message is passed on: nothing may come after the last one
            if self._has_ended:
                return
            match message:
                case EngineCoreOutputs():
                    self._ready_balancer().update(message)
                    self._on_message(message)
                case Pulse():
                    self._on_message(message)
                case UtilityResult():
                    self._collect(message)
                case LoadProgress():
                    if message.engine_index == self._first_unready():
                        self._on_message(message)
                case Ready():
                    self._take_ready(message)
                case EngineFailed():
                    self._has_ended = True
                    self._on_message(message)
                    self._stop_all()
                case Hello():
                    raise AssertionError("the handshake is the links' own business")

    def _collect(self, message: UtilityResult) -> None:
        """Answers a question once everybody has."""
        results = self._results[message.call_id]
        results[message.engine_index] = message.value
        if len(results) < self._size:
            return
        del self._results[message.call_id]
        values = [results[index] for index in range(self._size)]
        value: UtilityValue = [stats for one in values if isinstance(one, list) for stats in one]
        if all(isinstance(one, bool) for one in values):
            # Not at the same moment: where one was busy, the others have forgotten their prefixes all the same.
            value = all(values)
            self._ready_balancer().forget_prefixes()
        self._on_message(UtilityResult(message.call_id, value))

    def _first_unready(self) -> int | None:
        return min(set(range(self._size)) - self._infos.keys(), default=None)

    def _take_ready(self, message: Ready) -> None:
        self._infos[message.engine_index] = message.kv_cache_infos[0]
        if len(self._infos) == self._size:
            infos = [self._infos[index] for index in range(self._size)]
            block_size, has_prefix_cache = infos[0].block_size, self._config.cache.enable_prefix_caching
            self._balancer = ReplicaBalancer(self._size, block_size, has_prefix_cache)
            self._on_message(Ready(infos))


def connect_core(config: EngineConfig, on_message: OnMessage) -> CoreLink:
    """Starts an engine's core, or all its replicas, in processes of their own. A Connect.

    Raises:
      ConfigError: Every rank must come to the same steps, which a core of its own doesn't.
    """
    parallel = config.parallel
    if parallel.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            "distributed_executor_backend=external_launcher is for LLM and generate, whose ranks add the same requests "
            "before their first step; a server's come at any time: choose mp or ray"
        )
    if parallel.data_parallel_size == 1:
        return CoreProcess(config, on_message)
    has_several = parallel.distributed_executor_backend in _BACKENDS_WITHOUT_DEVICES
    return DataParallelLink(config, on_message, _process_each if has_several else _one_process)


def connect_replica_threads(config: EngineConfig, on_message: OnMessage) -> CoreLink:
    """Starts all replicas on threads of this process. A Connect."""

    def connect(config: EngineConfig, on_message: OnMessage) -> list[CoreLink]:
        threads: CoreLink = ReplicaThreads(config, on_message)
        return [threads] * config.parallel.data_parallel_size

    return DataParallelLink(config, on_message, connect)


def _one_process(config: EngineConfig, on_message: OnMessage) -> list[CoreLink]:
    process: CoreLink = CoreProcess(config, on_message)
    return [process] * config.parallel.data_parallel_size


def _process_each(config: EngineConfig, on_message: OnMessage) -> list[CoreLink]:
    processes: list[CoreLink] = []
    try:
        for rank in range(config.parallel.data_parallel_size):
            processes.append(CoreProcess(config.of_replica(rank), _stamped(on_message, rank)))
    except BaseException:
        for process in processes:
            process.shutdown()
        raise
    return processes


def _stamped(on_message: OnMessage, rank: int) -> OnMessage:
    def stamp(message: FromCore) -> None:
        assert not isinstance(message, Hello)
        on_message(msgspec.structs.replace(message, engine_index=rank))

    return stamp
