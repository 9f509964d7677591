"""EngineCoreLoop: the busy loop round an EngineCore. Messages in, news out. Knows queues, no socket and no process."""

import queue
from collections.abc import Callable
from typing import NamedTuple

from jaxllm.engine.core_messages import (
    AbortRequests,
    AddRequest,
    FinishSequence,
    FromCore,
    ShutDown,
    StartEngine,
    ToCore,
    UtilityCall,
    UtilityResult,
    UtilityValue,
)
from jaxllm.engine.engine_core import EngineCore
from jaxllm.engine.pulse import LoopState
from jaxllm.exceptions import EngineDeadError, InvalidRequestError
from jaxllm.logger import get_logger
from jaxllm.messages import EngineCoreOutputs, EngineCoreRequest, RefusedRequest

_logger = get_logger(__name__)


class WorkersFailed(NamedTuple):
    """Nothing can be computed any more, and this is why. From the executor, not from a front end."""

    reason: str


Inbox = queue.SimpleQueue[ToCore | RefusedRequest | WorkersFailed]


class EngineCoreLoop:
    """Runs a core until it is told to shut down.

    Args:
      engine_core: Used by nobody else.
      inbox: What to do. A RefusedRequest is one that couldn't even be read; it is passed on.
      send: Takes the news, in order. Must not block.

    Attributes:
      num_turns: Counts up with every step and every message.
    """

    def __init__(self, engine_core: EngineCore, inbox: Inbox, send: Callable[[FromCore], None]) -> None:
        self._engine_core = engine_core
        self._inbox = inbox
        self._send = send
        self.num_turns = 0
        self._is_waiting = False

    @property
    def state(self) -> LoopState:
        """What the loop does at this moment. Any thread may ask."""
        if self._is_waiting:
            return "waiting"
        return "on device" if self._engine_core.is_on_device else "working"

    def run(self) -> None:
        """Steps while there is work, sleeps while there is none. Returns after a ShutDown.

        Raises:
          Exception: A step or the workers failed; no request can be answered any more.
        """
        while self._take_messages():
            if self._engine_core.has_unfinished_requests():
                self._send(self._engine_core.step())
                self.num_turns += 1

    def _take_messages(self) -> bool:
        """Handles all that waits; if there is nothing else to do, waits for it. Returns False on ShutDown."""
        is_idle = not self._engine_core.has_unfinished_requests()
        refused: list[RefusedRequest] = []
        is_news = False
        while is_idle and not is_news or not self._inbox.empty():
            self._is_waiting = True
            message = self._inbox.get()
            self._is_waiting = False
            self.num_turns += 1
            if isinstance(message, ShutDown):
                return False
            is_news = True
            refused += self._handle(message)
        # No step will tell that the last request was aborted: the gauges must not stay where they were.
        is_idle_now = is_news and not self._engine_core.has_unfinished_requests()
        if refused or is_idle_now:
            self._send(EngineCoreOutputs([], self._engine_core.stats(), refused))
        return True

    def _handle(self, message: ToCore | RefusedRequest | WorkersFailed) -> list[RefusedRequest]:
        """Returns the requests that this message has ended."""
        match message:
            case AddRequest():
                return self._add(message.request)
            case AbortRequests():
                self._engine_core.abort_requests(message.request_ids)
            case FinishSequence():
                self._engine_core.finish_sequence(message.request_id, message.index)
            case UtilityCall():
                self._send(UtilityResult(message.call_id, self._answer(message)))
            case RefusedRequest():
                return [message]
            case WorkersFailed():
                raise EngineDeadError(message.reason)
            case StartEngine() | ShutDown():
                raise AssertionError("the engine has started, and ShutDown is no work")
        return []

    def _add(self, request: EngineCoreRequest) -> list[RefusedRequest]:
        try:
            self._engine_core.add_request(request)
        except InvalidRequestError as error:
            return [RefusedRequest(request.request_id, str(error), error.param)]
        except Exception:  # the fault of this request, or of ours with it: it ends alone
            _logger.exception("request %s can't be added", request.request_id)
            self._engine_core.abort_requests([request.request_id])
            return [RefusedRequest(request.request_id, "the engine failed to add this request", is_our_fault=True)]
        return []

    def _answer(self, call: UtilityCall) -> UtilityValue:
        if call.method == "reset_prefix_cache":
            return self._engine_core.reset_prefix_cache()
        return [self._engine_core.stats()]
