"""RequestStream: where one request's outputs wait for their reader. A slow reader gets fewer, larger ones.

Belongs to one event loop. Knows nothing of engines.
"""

import asyncio
from collections.abc import Callable

from jaxllm.exceptions import JaxllmError
from jaxllm.outputs import RequestOutput


class RequestStream:
    """One slot. Outputs are cumulative, so the newest stands for all before it.

    Args:
      snapshot: Returns the request's output as it is now. Called when the reader asks, not when something changes.
    """

    __slots__ = ("_snapshot", "_has_news", "_final_output", "_error")

    def __init__(self, snapshot: Callable[[], RequestOutput]) -> None:
        self._snapshot = snapshot
        self._has_news = asyncio.Event()
        self._final_output: RequestOutput | None = None
        self._error: JaxllmError | None = None

    def mark(self) -> None:
        """There is something new to be seen."""
        self._has_news.set()

    def finish(self, output: RequestOutput) -> None:
        """The request has ended, with this output."""
        self._final_output = output
        self._has_news.set()

    def fail(self, error: JaxllmError) -> None:
        """The request has ended without an output. What the reader has not seen is lost."""
        self._error = error
        self._has_news.set()

    async def get(self) -> RequestOutput:
        """Waits until there is something new, and returns all there is.

        Raises:
          JaxllmError: The request has failed.
        """
        await self._has_news.wait()
        if self._error is not None:
            raise self._error
        if self._final_output is not None:
            return self._final_output
        self._has_news.clear()
        return self._snapshot()
