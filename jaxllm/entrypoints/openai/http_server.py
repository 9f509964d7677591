"""Runs the servers of one engine on one event loop: uvicorn for HTTP, and gRPC beside it if asked for."""

import asyncio
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import FrameType

import uvicorn
import uvloop

from jaxllm.engine import garbage
from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.entrypoints.admission import AdmissionControl
from jaxllm.entrypoints.interval_log import INTERVAL_S, IntervalLog
from jaxllm.entrypoints.openai.api_server import build_app
from jaxllm.entrypoints.openai.gate import Gate
from jaxllm.entrypoints.openai.http_protocol import protocol_of
from jaxllm.entrypoints.openai.lifecycle import Lifecycle, SideServer
from jaxllm.entrypoints.openai.metrics_page import MetricsPage
from jaxllm.entrypoints.openai.serving_engine import ServingEngine
from jaxllm.entrypoints.openai.web_pages import for_web_pages
from jaxllm.entrypoints.server_settings import ServerSettings
from jaxllm.exceptions import JaxllmError
from jaxllm.logger import get_logger

_logger = get_logger(__name__)

_KEEP_ALIVE_S = 5
# How long a thread may keep the event loop from running. The loop asks anew for each connection that it reads: with
# Python's own 5 ms, twenty large bodies on their way held up everybody for 100 ms while another was parsed.
_SWITCH_S = 0.0005
_LAST_ANSWERS_S = 2  # for answers that are written when everything else has ended


StartSideServer = Callable[[AsyncLLMEngine, AdmissionControl], Awaitable[SideServer]]


def run_servers(
    engine: AsyncLLMEngine, settings: ServerSettings, listener: socket.socket, start_side: StartSideServer | None = None
) -> int:
    """Serves until told to end, or until the engine dies. Returns the exit code."""
    sys.setswitchinterval(_SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(engine, settings, listener, start_side))


async def _serve(
    engine: AsyncLLMEngine, settings: ServerSettings, listener: socket.socket, start_side: StartSideServer | None
) -> int:
    admission = AdmissionControl(settings.max_queue)
    serving = ServingEngine(
        engine,
        settings.served_model_names,
        admission,
    )
    page = MetricsPage(serving)
    gate = Gate(
        build_app(serving, page),
        admission,
        settings.api_keys,
        settings.allowed_hosts,
        settings.allowed_origins,
        settings.logs_requests,
    )
    side = None if start_side is None else await start_side(engine, admission)
    lifecycle = Lifecycle(serving, side, settings.shutdown_timeout_s)
    http = _HttpServer(gate, settings, lifecycle.on_signal)
    serving_http = asyncio.create_task(http.serve(sockets=[listener]))
    counting = asyncio.create_task(_count(serving, page))
    host, port = listener.getsockname()[:2]
    _logger.info("HTTP on %s:%d; the model is loading, /health tells how far", host, port)
    code = await lifecycle.run()
    counting.cancel()
    http.should_exit = True
    await serving_http
    with suppress(asyncio.CancelledError):
        await counting
    return code


async def _count(serving: ServingEngine, page: MetricsPage) -> None:
    """Counts from the first request on, and writes the log line."""
    with suppress(JaxllmError):  # whoever waits for the end says why
        await serving.engine.wait_ready()
        interval_log: IntervalLog = page.attach()
        serving.was_ready = True
        garbage.settle()
        _logger.info("ready to answer as %s", ", ".join(serving.served_model_names))
        while True:
            await asyncio.sleep(INTERVAL_S)
            interval_log.write()


class _HttpServer(uvicorn.Server):
    """uvicorn, whose signals go to our lifecycle: it would stop listening at once, where we drain first."""

    def __init__(self, gate: Gate, settings: ServerSettings, on_signal: Callable[[int], None]) -> None:
        tls = settings.tls
        wants_client_certs = tls is not None and tls.ca_certs is not None
        super().__init__(
            uvicorn.Config(
                for_web_pages(gate, settings.allowed_origins),
                http=protocol_of(gate),
                ssl_certfile=None if tls is None else tls.certfile,
                ssl_keyfile=None if tls is None else tls.keyfile,
                ssl_ca_certs=None if tls is None else tls.ca_certs,
                ssl_cert_reqs=ssl.CERT_REQUIRED if wants_client_certs else ssl.CERT_NONE,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_LAST_ANSWERS_S,
            )
        )
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_signal(sig)
