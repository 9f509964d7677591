"""grpc.health.v1: Check, List, and a Watch that sends each change as it happens.

A service serves while the engine is ready; "" is the server as a whole. The engine is asked for its phase some times a
second, which costs nothing and finds out about its death as well. Needs no API key.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, Protocol

import grpc

from jaxllm.entrypoints.grpc_server import descriptors
from jaxllm.entrypoints.grpc_server.errors import Refusal
from jaxllm.entrypoints.grpc_server.rpc import Method

_INTERVAL_S = 0.25
_LAST_WORDS_S = 1.0
_Response = descriptors.message_class("grpc.health.v1.HealthCheckResponse")
_ListResponse = descriptors.message_class("grpc.health.v1.HealthListResponse")
_NAMES = ("", descriptors.INFERENCE, descriptors.VLLM_ENGINE)


class Readiness(Protocol):
    """What can be asked whether it would take a request now."""

    @property
    def is_ready(self) -> bool: ...


class HealthService:
    """Call `run` in a task of its own; `close` ends it and the open Watch streams."""

    def __init__(self, target: Readiness) -> None:
        self._target = target
        self._is_closed = False
        self._status = self._current()
        self._changed = asyncio.Event()  # set at the next change, then replaced
        self._num_watchers = 0
        self._is_unwatched = asyncio.Event()
        self._is_unwatched.set()

    @property
    def methods(self) -> dict[str, Method]:
        return {"Check": self.check, "List": self.list, "Watch": self.watch}

    async def run(self) -> None:
        """Follows the engine until `close`."""
        while not self._is_closed:
            self._update()
            await asyncio.sleep(_INTERVAL_S)

    async def close(self) -> None:
        """Says NOT_SERVING to everybody, for good. Waits a moment for those to hear it who watch."""
        self._is_closed = True
        self._update()
        self._changed.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_unwatched.wait(), _LAST_WORDS_S)

    async def check(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        if request.service not in _NAMES:
            raise Refusal(
                grpc.StatusCode.NOT_FOUND, "SERVICE_UNKNOWN", f"service {request.service!r:.200} isn't watched here"
            )
        return _Response(status=self._current())

    async def list(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return _ListResponse(statuses={name: _Response(status=self._current()) for name in _NAMES})

    async def watch(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
        sent = None
        self._add_watchers(1)
        try:
            while True:
                self._update()  # what is sent is never older than the asking
                changed = self._changed
                status = self._status if request.service in _NAMES else _Response.SERVICE_UNKNOWN
                if status != sent:
                    sent = status
                    yield _Response(status=status)
                if self._is_closed and changed is self._changed:
                    return
                await changed.wait()
        finally:
            self._add_watchers(-1)

    def _add_watchers(self, number: int) -> None:
        self._num_watchers += number
        if self._num_watchers:
            self._is_unwatched.clear()
        else:
            self._is_unwatched.set()

    def _current(self) -> int:
        is_serving = self._target.is_ready and not self._is_closed
        return int(_Response.SERVING if is_serving else _Response.NOT_SERVING)

    def _update(self) -> None:
        status = self._current()
        if status != self._status:
            self._status = status
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
