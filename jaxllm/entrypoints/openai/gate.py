"""The outermost layer: keys, hosts, request ids, a full queue. Whatever isn't a probe must pass here.

A plain ASGI wrapper around the whole application, so that no route can be forgotten. Only what browsers ask before they
send a request is answered in front of it, by web_pages.py.
"""

import hmac
import os
import re
import time
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.entrypoints.admission import AdmissionControl
from jaxllm.entrypoints.openai.door import Door
from jaxllm.entrypoints.openai.errors import ApiError, queue_full
from jaxllm.entrypoints.openai.responses import error_response
from jaxllm.logger import get_logger

Headers = Iterable[tuple[bytes, bytes]]  # names in lower case

_logger = get_logger(__name__)

PROBES = frozenset(("/live", "/ready", "/health"))
_GENERATING = frozenset(("/v1/completions", "/v1/chat/completions"))
_GENERATING_URLS = {path.encode(): path for path in _GENERATING}
_NO_KEY = error_response(ApiError(401, "a valid key is needed: Authorization: Bearer KEY", code="invalid_api_key"))
_OTHER_HOST = error_response(
    ApiError(
        403,
        "this Host isn't served without a key; ask for localhost, or start the server with --api-key",
        code="host_not_allowed",
    )
)
_OTHER_ORIGIN = error_response(
    ApiError(
        403,
        "web pages of this Origin may not ask; start the server with --allowed-origins, or with --api-key",
        code="origin_not_allowed",
    )
)
_QUEUE_FULL = error_response(queue_full("the queue is full; ask again later"))
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_PORT = re.compile(r":[0-9]{1,5}$")


class EarlyAnswer(NamedTuple):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Gate:
    """Lets requests through to `app`.

    Args:
      app: Everything inside.
      admission: While nobody is let in, requests to generate are turned away here, before their bodies are read. The
        others may have to wait at the door for their turn.
      api_keys: A request must bring one of them as `Authorization: Bearer KEY`; none lets everybody in.
      allowed_hosts: Names that a Host header may have, None for any. Without keys it keeps web pages out that let
        their own names point at this machine.
      allowed_origins: Web pages that may send requests from a browser, "*" for any. Without keys those of the allowed
        hosts may, and no others.
      logs_requests: Whether each answer makes a log line, without anything of the request's body.
    """

    def __init__(
        self,
        app: ASGIApp,
        admission: AdmissionControl,
        api_keys: Sequence[str],
        allowed_hosts: Iterable[str] | None,
        allowed_origins: Sequence[str] = (),
        logs_requests: bool = False,
    ) -> None:
        self._app = app
        self._door = Door(admission)
        self._logs_requests = logs_requests
        self._key_digests = [sha256(key.encode()).digest() for key in api_keys]
        self._allowed_origins = frozenset(allowed_origins)
        self._allowed_hosts = None if allowed_hosts is None else frozenset(host.lower() for host in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope["headers"])
        start_s = time.monotonic()

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                elapsed_ms = int((time.monotonic() - start_s) * 1000)
                marks = _marks(request_id, elapsed_ms)
                message = {**message, "headers": [*message["headers"], *marks]}
                self._log(request_id, scope["method"], scope["path"], message["status"], elapsed_ms)
            await send(message)

        refusal = self._refusal(scope["path"], scope["headers"])
        if refusal is not None:
            await refusal(scope, receive, send_marked)
            return
        if scope["path"] in _GENERATING:
            await self._door.enter()
        await self._app(scope, receive, send_marked)

    def knock(self, url: bytes, headers: Headers) -> "EarlyAnswer | None":
        """Returns the answer to a POST request that doesn't come in, if its head alone says so.

        If it returns None, the request must be on its way to `__call__` in this turn of the event loop.
        """
        path = _GENERATING_URLS.get(url)
        if path is None or _values(headers, b"origin"):  # what is in front of the gate has to answer web pages, too
            return None
        refusal = self._refusal(path, headers)
        if refusal is None:
            self._door.expect()
            return None
        request_id = _request_id(headers)
        self._log(request_id, "POST", path, refusal.status_code, 0)
        return EarlyAnswer(refusal.status_code, [*refusal.raw_headers, *_marks(request_id, 0)], bytes(refusal.body))

    def _log(self, request_id: bytes, method: str, path: str, status: int, elapsed_ms: int) -> None:
        if self._logs_requests:
            _logger.info("%s: %s %.200s: %d after %d ms", request_id.decode(), method, path, status, elapsed_ms)

    def _refusal(self, path: str, headers: Headers) -> Response | None:
        if path in PROBES:
            return None
        if self._key_digests and not self._has_key(_values(headers, b"authorization")):
            return _NO_KEY
        if not self._key_digests and self._allowed_hosts is not None:
            if any(_host_name(host) not in self._allowed_hosts for host in _values(headers, b"host")):
                return _OTHER_HOST
            if not all(self._is_allowed_origin(origin) for origin in _values(headers, b"origin")):
                return _OTHER_ORIGIN
        if path in _GENERATING and self._door.is_full:
            return _QUEUE_FULL
        return None

    def _is_allowed_origin(self, origin: bytes) -> bool:
        """Whether a request may come from such a web page: one can send requests, though it can't read the answers."""
        if "*" in self._allowed_origins or origin.decode("latin-1") in self._allowed_origins:
            return True
        assert self._allowed_hosts is not None
        return _host_name(origin.rpartition(b"//")[2]) in self._allowed_hosts

    def _has_key(self, headers: list[bytes]) -> bool:
        if len(headers) != 1:
            return False
        scheme, _, key = headers[0].partition(b" ")
        digest = sha256(key.strip(b" ")).digest()
        # Compares with each key, whether an earlier one fits or not: the time tells nothing.
        matches = [hmac.compare_digest(digest, known) for known in self._key_digests]
        return scheme.lower() == b"bearer" and any(matches)


def _marks(request_id: bytes, elapsed_ms: int) -> list[tuple[bytes, bytes]]:
    """Returns the headers that every answer has."""
    return [(b"x-request-id", request_id), (b"openai-processing-ms", str(elapsed_ms).encode())]


def _request_id(headers: Headers) -> bytes:
    """Returns the client's id for this request if it is a harmless one, else a new one. It is a label, no more."""
    given = _values(headers, b"x-request-id")
    return given[0] if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]) else os.urandom(16).hex().encode()


def _values(headers: Headers, name: bytes) -> list[bytes]:
    return [value for key, value in headers if key == name]


def _host_name(header: bytes) -> str:
    return _PORT.sub("", header.decode("latin-1")).lower()
