"""An ASGI client without a socket, and the HTTP application on an engine whose core runs in a thread.

async with fake_server() as server:
    reply = await server.post("/v1/completions", {"prompt": "a"})
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.engine.front_end import FrontEnd
from jaxllm.entrypoints.admission import AdmissionControl
from jaxllm.entrypoints.openai.api_server import build_app
from jaxllm.entrypoints.openai.gate import Gate
from jaxllm.entrypoints.openai.metrics_page import MetricsPage
from jaxllm.entrypoints.openai.serving_engine import ServingEngine
from jaxllm.entrypoints.openai.web_pages import for_web_pages
from tests.fakes.fake_cores import ThreadCore, fake_config, fake_front_end

SERVER_EXECUTOR = "tests.fakes.server_executor:ServerExecutor"


@dataclass
class Reply:
    """An answer. `events` are a stream's JSON objects, without the [DONE] at its end."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.json) == {"error"} and set(self.json["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = self.json["error"]
        assert error["code"] is None or isinstance(error["code"], str)
        return error

    @property
    def events(self) -> list[Any]:
        assert self.headers["content-type"].startswith("text/event-stream"), self.body
        assert self.body.endswith(b"data: [DONE]\n\n")
        lines = self.body.decode().split("\n\n")[:-2]
        assert all(line.startswith("data: ") for line in lines)
        return [json.loads(line.removeprefix("data: ")) for line in lines]


class Call:
    """One request. Awaiting `reply` gives the whole answer; `disconnect` lets the client go."""

    def __init__(self, app: ASGIApp, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        raw = [(b"host", b"localhost"), *((key.encode(), value.encode()) for key, value in headers.items())]
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": raw,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        self._body = body
        self._has_read = False
        self._gone = asyncio.Event()
        self._pieces = asyncio.Event()
        self.received = Reply()
        self._task = asyncio.ensure_future(app(self._scope, self._receive, self._send))  # type: ignore[arg-type]
        self._task.add_done_callback(lambda _: self._pieces.set())

    async def reply(self) -> Reply:
        await self._task
        return self.received

    async def until(self, size: int) -> None:
        """Waits until the answer has some bytes, or all: a slow reader gets several tokens in one event."""
        while len(self.received.body) < size and not self._task.done():
            self._pieces.clear()
            await self._pieces.wait()

    def disconnect(self) -> None:
        self._gone.set()

    async def _receive(self) -> Message:
        if not self._has_read:
            self._has_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.received.status = message["status"]
            self.received.headers = {key.decode().lower(): value.decode() for key, value in message["headers"]}
            return
        self.received.body += message["body"]
        self._pieces.set()


class FakeServer:
    """The application, and the engine behind it."""

    def __init__(self, app: ASGIApp, engine: AsyncLLMEngine, serving: ServingEngine) -> None:
        self.app = app
        self.engine = engine
        self.serving = serving

    def call(self, method: str, path: str, content: Any = None, headers: Mapping[str, str] | None = None) -> Call:
        body = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
        return Call(self.app, method, path, body, headers or {})

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Reply:
        return await self.call("GET", path, None, headers).reply()

    async def post(self, path: str, content: Any, headers: Mapping[str, str] | None = None) -> Reply:
        return await self.call("POST", path, content, headers).reply()

    async def metric(self, name: str) -> float:
        """Returns the value of the first series of that name."""
        text = (await self.get("/metrics")).body.decode()
        return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


@asynccontextmanager
async def fake_server(
    executor: str = SERVER_EXECUTOR,
    front_end: FrontEnd | None = None,
    max_model_len: int = 128,
    max_queue: int | None = None,
    api_keys: tuple[str, ...] = (),
    allowed_hosts: tuple[str, ...] | None = None,
    allowed_origins: tuple[str, ...] = (),
) -> AsyncIterator[FakeServer]:
    """The whole application in this process, ready."""
    parts = front_end or fake_front_end(fake_config(executor, max_model_len))
    engine = AsyncLLMEngine(lambda: parts, connect=ThreadCore)
    serving = ServingEngine(engine, ("fake", "alias"), AdmissionControl(max_queue))
    page = MetricsPage(serving)
    gate = Gate(build_app(serving, page), serving.admission, api_keys, allowed_hosts, allowed_origins)
    await engine.wait_ready()
    page.attach()
    serving.was_ready = True
    try:
        yield FakeServer(for_web_pages(gate, allowed_origins), engine, serving)
    finally:
        await engine.shutdown()
