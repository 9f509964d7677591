"""A small asyncio HTTP/1.1 client that streams events, so that a benchmark measures the server and not its client.

One connection a request, as vLLM's benchmark has. Knows no OpenAI object.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

_MAX_LINE = 1 << 20


class HttpError(Exception):
    """The server answered with an error, or not as HTTP."""


class Server(NamedTuple):
    """Where requests go."""

    host: str
    port: int
    is_tls: bool
    prefix: str  # of every path
    headers: Mapping[str, str]


def parse_base_url(url: str, headers: Mapping[str, str]) -> Server:
    """Splits a URL such as "http://127.0.0.1:8000".

    Raises:
      ValueError: It is none.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        raise ValueError(f"not an http or https URL: {url!r}")
    is_tls = parts.scheme == "https"
    return Server(parts.hostname, parts.port or (443 if is_tls else 80), is_tls, parts.path.rstrip("/"), headers)


async def post_json(server: Server, path: str, content: Any) -> Any:
    """Returns the JSON that the server answers.

    Raises:
      HttpError, OSError: It answers with an error, or not at all.
    """
    return json.loads(b"".join([piece async for piece in _exchange(server, "POST", path, content)]))


async def get_json(server: Server, path: str) -> Any:
    """As `post_json`, without a body."""
    return json.loads(b"".join([piece async for piece in _exchange(server, "GET", path, None)]))


async def post_stream(server: Server, path: str, content: Any) -> AsyncGenerator[Any, None]:
    """Yields the JSON of each event, up to `[DONE]`.

    Raises:
      HttpError, OSError: The server answers with an error, or not at all.
    """
    rest = b""
    async for piece in _exchange(server, "POST", path, content):
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                return
            if event.startswith(b"data: "):
                yield json.loads(event[6:])


async def _exchange(server: Server, method: str, path: str, content: Any) -> AsyncGenerator[bytes, None]:
    """Sends one request and yields the pieces of its answer's body."""
    context = ssl.create_default_context() if server.is_tls else None
    reader, writer = await asyncio.open_connection(server.host, server.port, ssl=context, limit=_MAX_LINE)
    try:
        writer.write(_request_bytes(server, method, path, content))
        await writer.drain()
        status, headers = await _read_head(reader)
        pieces = _read_body(reader, headers)
        if status != 200:
            text = b"".join([piece async for piece in pieces]).decode("utf-8", "replace")
            raise HttpError(f"{status}: {text[:500]}")
        async for piece in pieces:
            yield piece
    except (asyncio.IncompleteReadError, ValueError) as error:
        raise HttpError(f"the answer broke off: {error}") from error
    finally:
        writer.close()


def _request_bytes(server: Server, method: str, path: str, content: Any) -> bytes:
    body = b"" if content is None else json.dumps(content).encode()
    head = {
        "host": f"{server.host}:{server.port}",
        "connection": "close",
        "content-type": "application/json",
        "content-length": str(len(body)),
        **server.headers,
    }
    lines = [f"{method} {server.prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status = int((await reader.readuntil(b"\r\n")).split(b" ", 2)[1])
    headers = {}
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return status, headers


async def _read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(_MAX_LINE):
            yield piece
