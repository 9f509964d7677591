"""AsyncMPClient: an asyncio front end's end of the line to an EngineCore in another process.

Messages come in on a thread of the link's and are handed over to the event loop. Knows no socket: what a link is made
of is core_process.py's business.
"""

import asyncio
import itertools
import math
import threading
import time
from collections import deque
from contextlib import suppress

from jaxllm.config import EngineConfig
from jaxllm.engine.core_link import Connect, OnMessage
from jaxllm.engine.core_messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    FinishSequence,
    FromCore,
    LoadProgress,
    Pulse,
    Ready,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
    UtilityValue,
)
from jaxllm.exceptions import EngineDeadError, JaxllmError, from_name
from jaxllm.messages import EngineCoreOutputs, EngineCoreRequest, SchedulerStats

_LAST_OUTPUTS_S = 0.5  # how long a dead core's outputs are still given out


class AsyncMPClient:
    """Use it from one event loop. Until it is ready there is nothing to be done but wait.

    Args:
      config: What the core is made from.
      connect: Starts a core: (config, where its messages go) -> link.
      on_state: Called, on the link's thread, with LoadProgress, Ready and EngineFailed.

    Attributes:
      error: Why the core has gone, None while it lives.
    """

    def __init__(self, config: EngineConfig, connect: Connect, on_state: OnMessage) -> None:
        self.error: JaxllmError | None = None
        self._give_up_s = math.inf
        self._on_state = on_state
        self._lock = threading.Lock()  # guards _inbox and _loop
        self._inbox: deque[FromCore] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._has_outputs = asyncio.Event()
        self._calls: dict[int, asyncio.Future[UtilityValue]] = {}
        self._call_ids = itertools.count()
        self._silent_s: dict[int, float] = {}  # of each engine core
        self._link = connect(config, self._receive)

    @property
    def silent_s(self) -> float:
        """For how many seconds an engine core has stood still, though there is work; 0 while none does."""
        return max(self._silent_s.values(), default=0.0)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request. If the core refuses it, that comes as an output."""
        self._link.send(AddRequest(request))

    def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests without further output. Unknown and finished ids are ignored."""
        self._link.send(AbortRequests(request_ids))

    def finish_sequence(self, request_id: str, index: int) -> None:
        """Ends one sequence whose text holds a stop string, without further output. Idempotent."""
        self._link.send(FinishSequence(request_id, index))

    async def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix. Returns False, and does nothing, while a sequence holds blocks.

        Raises:
          EngineDeadError: The core has gone.
        """
        result = await self._call("reset_prefix_cache")
        assert isinstance(result, bool)
        return result

    async def get_stats(self) -> list[SchedulerStats]:
        """Returns the schedulers' counters of this moment, in the order of the engine cores.

        Raises:
          EngineDeadError: The core has gone.
        """
        result = await self._call("get_stats")
        assert isinstance(result, list)
        return result

    async def get_output(self) -> EngineCoreOutputs:
        """Waits for the next step's news.

        Raises:
          EngineDeadError: The core has gone. What it had said before is given out, as far as that is quick: the
            others must not wait for their error until every old output has been read.
        """
        self._attach()
        if time.monotonic() > self._give_up_s:
            raise EngineDeadError(str(self.error))
        while not self._outputs:
            if self.error is not None and not self._inbox:
                raise EngineDeadError(str(self.error))
            self._has_outputs.clear()
            await self._has_outputs.wait()
        return self._outputs.popleft()

    def shutdown(self) -> None:
        """Ends the core and waits until it has gone. Blocks for some seconds at most; any thread may call it."""
        self._link.shutdown()

    async def _call(self, method: UtilityMethod) -> UtilityValue:
        self._attach()
        if self.error is not None:
            raise EngineDeadError(str(self.error))
        call = UtilityCall(next(self._call_ids), method)
        future: asyncio.Future[UtilityValue] = asyncio.get_running_loop().create_future()
        self._calls[call.call_id] = future
        try:
            self._link.send(call)
            return await future
        finally:
            del self._calls[call.call_id]

    def _receive(self, message: FromCore) -> None:
        """Takes a message on the link's thread."""
        if isinstance(message, Pulse):
            self._silent_s = {**self._silent_s, message.engine_index: message.silent_s}
            return
        if isinstance(message, EngineFailed):
            self.error = from_name(message.error, message.message)
            self._give_up_s = time.monotonic() + _LAST_OUTPUTS_S
        if isinstance(message, (LoadProgress, Ready, EngineFailed)):
            self._on_state(message)
        with self._lock:
            is_first = not self._inbox
            self._inbox.append(message)
            if is_first and self._loop is not None:
                with suppress(RuntimeError):  # the loop was closed: nobody listens any more
                    self._loop.call_soon_threadsafe(self._take_in)

    def _attach(self) -> None:
        if self._loop is None:
            with self._lock:
                self._loop = asyncio.get_running_loop()
            self._take_in()

    def _take_in(self) -> None:
        """Sorts what has come, on the event loop's thread."""
        with self._lock:
            messages, self._inbox = self._inbox, deque()
        for message in messages:
            if isinstance(message, EngineCoreOutputs):
                self._outputs.append(message)
            elif isinstance(message, UtilityResult):
                future = self._calls.get(message.call_id)
                if future is not None and not future.done():
                    future.set_result(message.value)
        if self.error is not None:
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(EngineDeadError(str(self.error)))
        self._has_outputs.set()
