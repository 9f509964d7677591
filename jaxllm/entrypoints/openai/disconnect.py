"""Work for a client that may go: whatever it asked for ends when it goes."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Returns what `work` returns; cancels it if the client goes first. The request's body must have been read."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_disconnect(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        return Response(status_code=499)  # nobody reads it
    finally:
        leaving.cancel()
        working.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await working
