"""EngineStart: brings an engine up in the background. Knows how far it is, why it can't go on, and how to end it."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import NamedTuple

from jaxllm.engine.async_mp_client import AsyncMPClient
from jaxllm.engine.core_link import Connect
from jaxllm.engine.core_messages import EngineFailed, FromCore, LoadProgress, Ready
from jaxllm.engine.front_end import FrontEnd
from jaxllm.exceptions import EngineDeadError, JaxllmError, from_name
from jaxllm.logger import get_logger
from jaxllm.messages import KVCacheInfo
from jaxllm.progress import reporting_to

_logger = get_logger(__name__)


class StartedEngine(NamedTuple):
    front_end: FrontEnd
    client: AsyncMPClient
    kv_cache_infos: list[KVCacheInfo]  # of each engine core


class EngineStart:
    """Begins at once: reads what the front end needs on a thread, then starts the core. Any thread may ask.

    Args:
      load: Returns the front end's parts.
      connect: Starts the core.

    Attributes:
      progress: What is being done, and how far it is.
      front_end: None until it has been read.
      result: The engine once it is ready, or why it never will be.
      is_stopped: Whether kill() came before any error.
    """

    def __init__(self, load: Callable[[], FrontEnd], connect: Connect) -> None:
        self.progress = LoadProgress("opening the model")
        self.front_end: FrontEnd | None = None
        self.result: concurrent.futures.Future[StartedEngine] = concurrent.futures.Future()
        self.is_stopped = False
        self._connect = connect
        self._client: AsyncMPClient | None = None
        self._kv_cache_infos: list[KVCacheInfo] | None = None
        self._error: JaxllmError | None = None
        self._lock = threading.Lock()  # guards everything that two threads may set
        threading.Thread(target=self._load, args=(load,), name="engine-loader", daemon=True).start()

    @property
    def error(self) -> JaxllmError | None:
        """Why the engine can't answer any more; None while it may, and after a kill() that came first."""
        if self.is_stopped:
            return None
        return self._error or (self._client.error if self._client is not None else None)

    @property
    def silent_s(self) -> float:
        """For how many seconds the core has stood still, though there is work; 0 while it doesn't."""
        return 0.0 if self._client is None else self._client.silent_s

    def fail(self, error: JaxllmError) -> None:
        """Takes note that the front end has failed."""
        self._error = error

    def kill(self) -> None:
        """Ends the core and waits until its process has gone. Idempotent."""
        with self._lock:
            self.is_stopped = self.error is None
            client = self._client
        if client is not None:
            client.shutdown()
        self._end(EngineDeadError("the engine was shut down while it loaded"))

    def _load(self, load: Callable[[], FrontEnd]) -> None:
        try:
            with reporting_to(self._report):
                front_end = load()
            with self._lock:
                if self.is_stopped:
                    return
                self.front_end = front_end
                self.progress = LoadProgress("starting the engine process")
                self._client = AsyncMPClient(front_end.config, self._connect, self._take_state)
                self._end_if_ready()
        except JaxllmError as error:
            self._end(error)
        except Exception as error:
            _logger.exception("the model can't be loaded")
            self._end(EngineDeadError(f"loading failed: {type(error).__name__}: {error}"))

    def _report(self, phase: str, percent: float | None, eta_s: float | None) -> None:
        self.progress = LoadProgress(phase, percent, eta_s)

    def _take_state(self, message: FromCore) -> None:
        """Takes what the core says about itself, on its link's thread."""
        match message:
            case LoadProgress():
                self.progress = message
            case Ready():
                with self._lock:
                    self._kv_cache_infos = message.kv_cache_infos
                    self._end_if_ready()
            case EngineFailed():
                self._end(from_name(message.error, message.message))

    def _end_if_ready(self) -> None:
        """Hands the engine out; the core may be ready before its client has been returned. Needs the lock."""
        if self._client is not None and self._kv_cache_infos is not None and not self.result.done():
            assert self.front_end is not None
            self.result.set_result(StartedEngine(self.front_end, self._client, self._kv_cache_infos))

    def _end(self, error: JaxllmError) -> None:
        with self._lock:
            if not self.result.done():
                self._error = error
                self.result.set_exception(error)
