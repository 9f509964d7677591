"""uvicorn's HTTP/1.1 protocol, but the gate sees a request's head before anything is made for it. Knows no rule itself.

While the queue is full thousands may come at once, and a task, a request and a response for each would keep those
waiting that are read last. What is answered here would get the same answer on uvicorn's way.
"""

from functools import cache
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxllm.entrypoints.openai.gate import EarlyAnswer, Gate


class HttpProtocol(HttpToolsProtocol):
    """One connection. protocol_of makes the class that uvicorn takes.

    Attributes:
      gate: Says who is answered at once.

    Args:
      **kwargs: uvicorn's.
    """

    gate: Gate

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._is_answered = False  # the request that is being read

    def on_headers_complete(self) -> None:
        """Called when a request's head has been read."""
        answer = self.gate.knock(self.url, self.headers) if self._is_plain_post() else None
        self._is_answered = answer is not None
        if answer is None:
            super().on_headers_complete()
        else:
            self.transport.write(self._bytes_of(answer))

    def on_body(self, body: bytes) -> None:
        """Called with each piece of a request's body; one that has its answer already is read for nobody."""
        if not self._is_answered:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Called when a request has been read."""
        if self._is_answered:
            self.on_response_complete()
        else:
            super().on_message_complete()

    def _is_plain_post(self) -> bool:
        """Whether nothing stands between this head and an answer. What is out of the ordinary isn't worth the haste."""
        parser, previous = self.parser, self.cycle
        return (
            parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
            and parser.should_keep_alive()
            and not parser.should_upgrade()
            and not self.expect_100_continue
            and not self.flow.write_paused
            and (previous is None or previous.response_complete)
        )

    def _bytes_of(self, answer: EarlyAnswer) -> bytes:
        headers = [*self.server_state.default_headers, *answer.headers]
        lines = [b"%s: %s\r\n" % header for header in headers]
        return b"".join([_status_line(answer.status), *lines, b"\r\n", answer.body])


def protocol_of(gate: Gate) -> type[HttpProtocol]:
    """Returns the class of a server's connections, which all ask one gate."""

    class GatedProtocol(HttpProtocol): ...

    GatedProtocol.gate = gate
    return GatedProtocol


@cache
def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
