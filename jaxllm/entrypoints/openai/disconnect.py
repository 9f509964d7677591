"""Work for a client that may go: whatever it asked for ends when it goes."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Awaitable[Response]) -> Response:
    """Returns what `work` returns; cancels it if the client goes first. The request's body must have been read.

    The work begins at once, in the caller's task: under a burst of requests, each is let in or turned away when it is
    first looked at, not after all others have been.
    """
    task = asyncio.current_task()
    assert task is not None
    has_gone = is_over = False

    def on_gone(leaving: "asyncio.Task[Any]") -> None:
        nonlocal has_gone
        if not is_over and not leaving.cancelled():
            has_gone = True
            task.cancel()

    leaving = asyncio.ensure_future(until_disconnect(request.receive))
    leaving.add_done_callback(on_gone)
    try:
        return await work
    except asyncio.CancelledError:
        if not has_gone:
            raise
        task.uncancel()
        return Response(status_code=499)  # nobody reads it
    finally:
        is_over = True  # the callback may be on its way already
        leaving.cancel()
