"""JSON answers: our own encoder, and errors in their one form."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from jaxllm.entrypoints.openai.errors import ApiError

_encoder = msgspec.json.Encoder()


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns `content` as JSON."""
    return Response(_encoder.encode(content), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    """Returns an error as its body, with the headers that go with it."""
    return json_response(error.body, error.status, error.headers)
