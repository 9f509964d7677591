"""A server's life after it was told to end, or its engine has: drain, answer the rest with errors, say why.

0  drained            2  usage or port       3  device        4  model load        5  the engine died
128 + N  a second signal N came while it drained
"""

import asyncio
import logging
import os
import signal
from typing import Protocol

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
        self._signal: int | None = None
        self._is_asked = asyncio.Event()

    def on_signal(self, number: int) -> None:
        """The first signal asks to drain. The second ends the process here and now; the engine's follows by itself."""
        if self._signal is not None:
            logging.shutdown()
            os._exit(128 + number)
        self._signal = number
        self._loop.call_soon_threadsafe(self._is_asked.set)

    async def run(self) -> int:
        """Returns the exit code, once everything that can still be answered has been."""
        engine = self._serving.engine
        watching = asyncio.ensure_future(_until_dead(engine))
        asked = asyncio.ensure_future(self._is_asked.wait())
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
            await asyncio.sleep(_LINGER_S)
        if self._side is not None:
            await self._side.stop(0.0)
        return code

    async def _drain(self) -> int:
        assert self._signal is not None
        self._serving.is_draining = True
        engine, timeout_s = self._serving.engine, self._shutdown_timeout_s
        name = signal.Signals(self._signal).name
        _logger.info("%s: draining %d requests, %g s at most", name, engine.num_unfinished_requests, timeout_s)
        stopping = [] if self._side is None else [self._side.stop(timeout_s)]
        await asyncio.gather(engine.shutdown(timeout_s), *stopping)
        return EXIT_OK


async def _until_dead(engine: AsyncLLMEngine) -> JaxllmError:
    """Returns why the engine has failed, once it has."""
    try:
        await engine.wait_ready()
    except JaxllmError as error:
        return error
    while engine.dead_error is None:
        await asyncio.sleep(_POLL_S)
    return engine.dead_error
