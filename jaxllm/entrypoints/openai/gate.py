"""The outermost layer: keys, hosts, request ids, a full queue. Whatever isn't a probe must pass here.

A plain ASGI wrapper around the whole application, so that no route can be forgotten.
"""

import hmac
import re
import time
from collections.abc import Iterable, Sequence
from hashlib import sha256
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.entrypoints.admission import AdmissionControl
from jaxllm.entrypoints.openai.errors import ApiError, queue_full
from jaxllm.entrypoints.openai.responses import error_response
from jaxllm.logger import get_logger

_logger = get_logger(__name__)

PROBES = frozenset(("/live", "/ready", "/health"))
_GENERATING = frozenset(("/v1/completions", "/v1/chat/completions"))
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_PORT = re.compile(r":[0-9]{1,5}$")


class Gate:
    """Lets requests through to `app`.

    Args:
      app: Everything inside.
      admission: While nobody is let in, requests to generate are turned away here, before their bodies are read.
      api_keys: A request must bring one of them as `Authorization: Bearer KEY`; none lets everybody in.
      allowed_hosts: Names that a Host header may have, None for any. Without keys it keeps web pages out that let
        their own names point at this machine.
      logs_requests: Whether each answer makes a log line, without anything of the request's body.
    """

    def __init__(
        self,
        app: ASGIApp,
        admission: AdmissionControl,
        api_keys: Sequence[str],
        allowed_hosts: Iterable[str] | None,
        logs_requests: bool = False,
    ) -> None:
        self._app = app
        self._admission = admission
        self._logs_requests = logs_requests
        self._key_digests = [sha256(key.encode()).digest() for key in api_keys]
        self._allowed_hosts = None if allowed_hosts is None else frozenset(host.lower() for host in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        start_s = time.monotonic()

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                elapsed_ms = int((time.monotonic() - start_s) * 1000)
                marks = [(b"x-request-id", request_id), (b"openai-processing-ms", str(elapsed_ms).encode())]
                message = {**message, "headers": [*message["headers"], *marks]}
                if self._logs_requests:
                    parts = (request_id.decode(), scope["method"], scope["path"], message["status"], elapsed_ms)
                    _logger.info("%s: %s %.200s: %d after %d ms", *parts)
            await send(message)

        error = None if scope["path"] in PROBES else self._refusal(scope)
        app = self._app if error is None else error_response(error)
        await app(scope, receive, send_marked)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if self._key_digests and not self._has_key(_headers(scope, b"authorization")):
            return ApiError(401, "a valid key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        if scope["path"] in _GENERATING and self._admission.is_full:
            return queue_full("the queue is full; ask again later")
        if self._key_digests:
            return None
        hosts = _headers(scope, b"host")
        if self._allowed_hosts is not None and any(_host_name(host) not in self._allowed_hosts for host in hosts):
            message = "this Host isn't served without a key; ask for localhost, or start the server with --api-key"
            return ApiError(403, message, code="host_not_allowed")
        return None

    def _has_key(self, headers: list[bytes]) -> bool:
        if len(headers) != 1:
            return False
        scheme, _, key = headers[0].partition(b" ")
        digest = sha256(key.strip(b" ")).digest()
        # Compares with each key, whether an earlier one fits or not: the time tells nothing.
        matches = [hmac.compare_digest(digest, known) for known in self._key_digests]
        return scheme.lower() == b"bearer" and any(matches)


def _request_id(scope: Scope) -> bytes:
    """Returns the client's id for this request if it is a harmless one, else a new one. It is a label, no more."""
    given = _headers(scope, b"x-request-id")
    return given[0] if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]) else uuid4().hex.encode()


def _headers(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _host_name(header: bytes) -> str:
    return _PORT.sub("", header.decode("latin-1")).lower()
