"""HTTP connections of our protocol without sockets: bytes in, bytes out.

connection = Connection(gate)
connection.feed(request_bytes("/v1/completions", b"{}"))
answers = await connection.answers(1)
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from jaxllm.entrypoints.openai.gate import Gate
from jaxllm.entrypoints.openai.http_protocol import protocol_of

DATE = (b"date", b"Mon, 01 Jan 2024 00:00:00 GMT")
_HEADERS = {"host": "localhost", "x-request-id": "mine"}


def request_bytes(
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    method: str = "POST",
    version: str = "1.1",
) -> bytes:
    fields = {**_HEADERS, "content-length": str(len(body)), **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/{version}\r\n{lines}\r\n".encode() + body


class Connection(asyncio.Transport):
    """A connection, as the protocol and as its transport, which keeps what is written.

    Args:
      app: What answers in the end.
      gate: What is asked first; None for uvicorn's own protocol.
    """

    def __init__(self, app: ASGIApp, gate: Gate | None) -> None:
        super().__init__()
        config = uvicorn.Config(app, http="httptools", lifespan="off", log_config=None, server_header=False)
        config.load()
        state = ServerState()
        state.default_headers = [DATE]
        self.tasks = state.tasks
        self.written = b""
        self._is_closed = False
        self._has_written = asyncio.Event()
        parts: dict[str, Any] = {"config": config, "server_state": state, "app_state": {}}
        self.protocol: Any = config.http_protocol_class(**parts) if gate is None else protocol_of(gate)(**parts)
        self.protocol.connection_made(self)

    def feed(self, data: bytes) -> None:
        """Lets the protocol read."""
        self.protocol.data_received(data)

    async def answers(self, count: int) -> list[bytes]:
        """Waits for that many answers, and returns each with head and body."""
        while len(found := _split(self.written)) < count and not self._is_closed:
            self._has_written.clear()
            await self._has_written.wait()
        return found

    def write(self, data: Any) -> None:
        self.written += data
        self._has_written.set()

    def is_closing(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True
        self._has_written.set()

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def _split(data: bytes) -> list[bytes]:
    """Splits whole answers that say their length."""
    found = []
    while data:
        head, end, rest = data.partition(b"\r\n\r\n")
        lens = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")]
        if not end or len(rest) < lens[0]:
            break
        found.append(head + end + rest[: lens[0]])
        data = rest[lens[0] :]
    return found
