"""Errors as clients see them: one table from our exceptions to HTTP statuses, one form for all bodies.

    {"error": {"message": str, "type": str, "param": str | None, "code": str | None}}

What a client reads comes from our own messages: no exception's repr, path or address gets out.
"""

from typing import Any

from jaxllm.exceptions import EngineDeadError, InvalidRequestError, JaxllmError, RequestFailedError
from jaxllm.logger import get_logger

_logger = get_logger(__name__)

RETRY_LOADING_S = 5
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(JaxllmError):
    """An answer that is an error.

    Attributes:
      status: The HTTP status.
      param: The request's field at fault, or None.
      code: The kind of error, for programs, or None.
      retry_after_s: When asking again may help, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": _TYPES[self.status], "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


def to_api_error(error: BaseException, prompt_field: str = "prompt") -> ApiError:
    """Returns what a client is told of an error; an error that isn't a known one is logged.

    Args:
      error: Any.
      prompt_field: The body's field that the prompt came from.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        param = prompt_field if error.param in ("prompt", "prompt_token_ids") else error.param
        return ApiError(400, _one_line(error), param, error.code or (param and "invalid_value"))
    if isinstance(error, RequestFailedError):
        return ApiError(500, "the engine failed at this request; others go on", code="request_failed")
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine stopped before this request was answered", code="engine_dead")
    _logger.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log says more", code="internal_error")


def unsupported_field(name: str) -> ApiError:
    return ApiError(400, f"{name} is not supported by this server; leave it out", name, "unsupported_parameter")


def queue_full(message: str, retry_after_s: int = 1) -> ApiError:
    return ApiError(429, message, code="queue_full", retry_after_s=retry_after_s)


def model_not_found(model: str, served: tuple[str, ...]) -> ApiError:
    message = f"model {model!r:.200} is not served here; served: {', '.join(served)}"
    return ApiError(404, message, "model", "model_not_found")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
