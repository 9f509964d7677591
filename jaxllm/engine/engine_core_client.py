"""EngineCoreClient: how LLMEngine talks to an EngineCore, wherever that runs. InprocClient: in the caller's thread.

Data parallel replicas are several cores behind one client; the link that they share tells them apart.

sync_mp_client.py has the one for a core in another process, async_mp_client.py that of AsyncLLMEngine.
"""

from abc import ABC, abstractmethod

from jaxllm.engine.engine_core import EngineCore
from jaxllm.exceptions import EngineDeadError
from jaxllm.messages import EngineCoreOutputs, EngineCoreRequest, KVCacheInfo, SchedulerStats


class EngineCoreClient(ABC):
    """Add requests, then call get_output() while there are unfinished ones.

    Attributes:
      kv_cache_infos: What each core's worker allocated.
    """

    kv_cache_infos: list[KVCacheInfo]

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request.

        Raises:
          InvalidRequestError: This request can't run; the others aren't touched.
        """

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests without further output. Unknown and finished ids are ignored."""

    @abstractmethod
    def finish_sequence(self, request_id: str, index: int) -> None:
        """Ends one sequence whose text holds a stop string, without further output. Idempotent."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix. Returns False, and does nothing, while a sequence holds blocks."""

    @abstractmethod
    def get_stats(self) -> list[SchedulerStats]:
        """Returns each core's counters and gauges of this moment."""

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """Waits for the next step's news. Call it only while there are unfinished requests.

        Raises:
          EngineDeadError: The core has failed; no request will be answered any more.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Frees the device. Idempotent."""


class InprocClient(EngineCoreClient):
    """Runs the core in the caller's thread: each get_output() is one step."""

    def __init__(self, engine_core: EngineCore) -> None:
        self._engine_core = engine_core
        self._error: Exception | None = None
        self.kv_cache_infos = [engine_core.kv_cache_info]

    def add_request(self, request: EngineCoreRequest) -> None:
        self._engine_core.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._engine_core.abort_requests(request_ids)

    def finish_sequence(self, request_id: str, index: int) -> None:
        self._engine_core.finish_sequence(request_id, index)

    def reset_prefix_cache(self) -> bool:
        return self._engine_core.reset_prefix_cache()

    def get_stats(self) -> list[SchedulerStats]:
        return [self._engine_core.stats()]

    def get_output(self) -> EngineCoreOutputs:
        if self._error is None:
            try:
                return self._engine_core.step()
            except Exception as error:
                self._error = error
        raise EngineDeadError(f"the engine has failed: {self._error!r}") from self._error

    def shutdown(self) -> None:
        self._engine_core.shutdown()
