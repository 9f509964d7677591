"""Server-sent events: `data: JSON`, a blank line, and `[DONE]` at the end. Knows no engine and no OpenAI object."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxllm.entrypoints.openai.disconnect import until_disconnect
from jaxllm.entrypoints.openai.errors import to_api_error

STALL_S = 30.0  # a client that takes nothing for so long is given up
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def event(content: Any) -> bytes:
    """Returns one event."""
    return b"data: " + _encoder.encode(content) + b"\n\n"


class EventStream(Response):
    """An answer that is a stream of events, each already bytes; `open` makes one.

    The generator is closed however the answer ends: at its end, when the client goes, when the client takes nothing for
    STALL_S. An error in it is one more event, after which `[DONE]` comes as always.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # its end isn't known
        self._first = first
        self._events = events

    @classmethod
    async def open(cls, events: AsyncGenerator[bytes, None]) -> "EventStream":
        """Returns the answer once its first event is there; what fails before that can still get a status of its own.

        Raises:
          Exception: Whatever the generator raised before its first event.
        """
        return cls(await anext(events), events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(until_disconnect(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            writing.cancel()
            # A client that went is no error; the server closes the connection of one that stalled.
            with suppress(asyncio.CancelledError, OSError):
                await writing
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_body(send, self._first)
        try:
            async for data in self._events:
                await _send_body(send, data)
        except OSError:
            raise
        except Exception as error:
            await _send_body(send, event(to_api_error(error).body))
        await _send_body(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_body(send: Send, data: bytes) -> None:
    async with asyncio.timeout(STALL_S):
        await send({"type": "http.response.body", "body": data, "more_body": True})
