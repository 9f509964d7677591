"""A server's life after it was told to end, or its engine has: drain, answer the rest with errors, say why.

0  drained            2  usage or port       3  device        4  model load        5  the engine died
128 + N  a second signal N came while it drained
"""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, Protocol

from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.entrypoints.openai.serving_engine import ServingEngine
from jaxllm.exceptions import EXIT_OK, JaxllmError, exit_code
from jaxllm.logger import get_logger

_logger = get_logger(__name__)

_POLL_S = 0.25
_LINGER_S = 3.0  # how long a server says 503 after its engine has died, before it ends too


class SideServer(Protocol):
    """A server of another protocol on the same engine, which ends with this one."""

    async def stop(self, grace_s: float) -> None:
        """Takes no further request, waits up to `grace_s` for those that run, and ends the rest."""


class Lifecycle:
    """Waits for the end. `on_signal` may be called from a signal handler.

    Args:
      serving: What is drained.
      side: The other server, if there is one.
      shutdown_timeout_s: How long requests may go on.
    """

    def __init__(self, serving: ServingEngine, side: SideServer | None, shutdown_timeout_s: float) -> None:
        self._serving = serving
        self._side = side
        self._shutdown_timeout_s = shutdown_timeout_s
        self._loop = asyncio.get_running_loop()
        self._signals: list[int] = []
        self._first_signal = asyncio.Event()
        self._second_signal = asyncio.Event()

    def on_signal(self, number: int) -> None:
        """The first signal asks to drain, the second to end at once."""
        self._signals.append(number)
        event = self._first_signal if len(self._signals) == 1 else self._second_signal
        self._loop.call_soon_threadsafe(event.set)

    async def run(self) -> int:
        """Returns the exit code, once everything that can still be answered has been."""
        engine = self._serving.engine
        watching = asyncio.ensure_future(_until_dead(engine))
        asked = asyncio.ensure_future(self._first_signal.wait())
        try:
            await asyncio.wait({watching, asked}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                return await self._bury(watching.result())
            return await self._drain()
        finally:
            watching.cancel()
            asked.cancel()

    async def _bury(self, error: JaxllmError) -> int:
        code = exit_code(error)
        _logger.error("%s; the server ends with exit code %d", " ".join(str(error).split()), code)
        if self._serving.was_ready:
            # Streams get their last events, and probes see that nothing more is to be had.
            await self._before_second_signal(asyncio.sleep(_LINGER_S))
        if self._side is not None:
            await self._side.stop(0.0)
        return code

    async def _drain(self) -> int:
        name = signal.Signals(self._signals[0]).name
        self._serving.is_draining = True
        num_requests = self._serving.engine.num_unfinished_requests
        _logger.info("%s: draining %d requests, %g s at most", name, num_requests, self._shutdown_timeout_s)
        if await self._before_second_signal(self._stop_all()):
            return EXIT_OK
        self._serving.engine.kill()
        return 128 + self._signals[1]

    async def _stop_all(self) -> None:
        stopping = [] if self._side is None else [self._side.stop(self._shutdown_timeout_s)]
        await asyncio.gather(self._serving.engine.shutdown(self._shutdown_timeout_s), *stopping)

    async def _before_second_signal(self, work: Coroutine[Any, Any, None]) -> bool:
        """Waits for `work`, or a second signal if that comes first. Returns whether the work was done."""
        working = asyncio.ensure_future(work)
        second = asyncio.ensure_future(self._second_signal.wait())
        await asyncio.wait({working, second}, return_when=asyncio.FIRST_COMPLETED)
        second.cancel()
        if working.done():
            working.result()
            return True
        working.cancel()
        return False


async def _until_dead(engine: AsyncLLMEngine) -> JaxllmError:
    """Returns why the engine has failed, once it has."""
    try:
        await engine.wait_ready()
    except JaxllmError as error:
        return error
    while engine.dead_error is None:
        await asyncio.sleep(_POLL_S)
    return engine.dead_error
