"""SyncMPClient: LLMEngine's end of the line to an EngineCore in another process."""

import itertools
import queue
import weakref
from collections import deque

from jaxllm.config import EngineConfig
from jaxllm.engine.core_link import Connect, OnMessage
from jaxllm.engine.core_messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    FinishSequence,
    FromCore,
    Pulse,
    Ready,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
    UtilityValue,
)
from jaxllm.engine.engine_core_client import EngineCoreClient
from jaxllm.exceptions import EngineDeadError, InvalidRequestError, JaxllmError, from_name
from jaxllm.messages import EngineCoreOutputs, EngineCoreRequest, SchedulerStats


class SyncMPClient(EngineCoreClient):
    """The core steps by itself while it has work; get_output() waits for what it says. For one thread.

    The core goes when this object does, or the interpreter.

    Args:
      config: What the core is made from.
      connect: Starts a core.

    Raises:
      ConfigError, ModelLoadError, DeviceError, EngineDeadError: The core can't start.
    """

    def __init__(self, config: EngineConfig, connect: Connect) -> None:
        self._inbox: queue.SimpleQueue[FromCore] = queue.SimpleQueue()
        self._outputs: deque[EngineCoreOutputs] = deque()  # came while a call waited for its result
        self._call_ids = itertools.count()
        self._error: JaxllmError | None = None
        self._link = connect(config, _without_pulses(self._inbox))
        self._finalizer = weakref.finalize(self, self._link.shutdown)
        try:
            self.kv_cache_infos = self._wait_ready().kv_cache_infos
        except BaseException:  # Ctrl-C too
            self.shutdown()
            raise

    def add_request(self, request: EngineCoreRequest) -> None:
        try:
            self._link.send(AddRequest(request))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(f"the request can't be sent to the engine: {error}") from error

    def abort_requests(self, request_ids: list[str]) -> None:
        self._link.send(AbortRequests(request_ids))

    def finish_sequence(self, request_id: str, index: int) -> None:
        self._link.send(FinishSequence(request_id, index))

    def reset_prefix_cache(self) -> bool:
        result = self._call("reset_prefix_cache")
        assert isinstance(result, bool)
        return result

    def get_stats(self) -> list[SchedulerStats]:
        result = self._call("get_stats")
        assert isinstance(result, list)
        return result

    def get_output(self) -> EngineCoreOutputs:
        while not self._outputs:
            message = self._next()
            if isinstance(message, EngineCoreOutputs):
                return message
        return self._outputs.popleft()

    def shutdown(self) -> None:
        self._finalizer()

    def _wait_ready(self) -> Ready:
        while not isinstance(message := self._next(), Ready):
            pass  # LoadProgress: the core shows a bar by itself
        return message

    def _call(self, method: UtilityMethod) -> UtilityValue:
        call = UtilityCall(next(self._call_ids), method)
        self._link.send(call)
        while True:
            message = self._next()
            if isinstance(message, EngineCoreOutputs):
                self._outputs.append(message)
            elif isinstance(message, UtilityResult) and message.call_id == call.call_id:
                return message.value

    def _next(self) -> FromCore:
        """Waits for the core's next message; its last one is raised, each time anew."""
        if self._error is None:
            message = self._inbox.get()
            if not isinstance(message, EngineFailed):
                return message
            self._error = from_name(message.error, message.message)
            raise self._error
        raise EngineDeadError(str(self._error))


def _without_pulses(inbox: "queue.SimpleQueue[FromCore]") -> OnMessage:
    """Returns what takes messages to the inbox, and knows no client: a link must not keep its client alive.

    Nobody asks this client whether the core stands still, and the log tells.
    """

    def receive(message: FromCore) -> None:
        if not isinstance(message, Pulse):
            inbox.put(message)

    return receive
