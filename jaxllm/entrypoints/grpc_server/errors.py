"""Our exceptions -> gRPC status codes with google.rpc details, in one table.

A client learns the rule that was broken, what came and the way out, never the inside of the server: what isn't in the
table is an INTERNAL error with a fixed text, and stands in the log.
"""

from typing import Any, NoReturn

import grpc

from jaxllm.entrypoints.admission import QueueFullError
from jaxllm.entrypoints.grpc_server import descriptors
from jaxllm.exceptions import (
    ConfigError,
    DeviceError,
    EngineDeadError,
    InvalidRequestError,
    JaxllmError,
    ModelLoadError,
    RequestFailedError,
)
from jaxllm.logger import get_logger

DOMAIN = "jaxllm"
_DETAILS_KEY = "grpc-status-details-bin"
_Status = descriptors.message_class("google.rpc.Status")
_ErrorInfo = descriptors.message_class("google.rpc.ErrorInfo")
_RetryInfo = descriptors.message_class("google.rpc.RetryInfo")
_BadRequest = descriptors.message_class("google.rpc.BadRequest")
_RequestInfo = descriptors.message_class("google.rpc.RequestInfo")
_logger = get_logger(__name__)


class Refusal(Exception):
    """What one call is answered instead of a result.

    Attributes:
      code: The status code.
      reason: The same for programs, in capitals; ErrorInfo carries it.
      message: One line for people.
      field: The request's field that is at fault, or None; BadRequest carries it.
      retry_after_s: When it makes sense to come again, or None; RetryInfo carries it.
      metadata: Facts for programs; ErrorInfo carries them.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.metadata = metadata or {}


_ENGINE_DEAD = "the engine has stopped; no request can be answered any more"
_INTERNAL = "internal error; the server's log says more"

# Error -> status code, reason, and what clients read; None shows the error's own message, which is about the request.
TABLE: dict[type[JaxllmError], tuple[grpc.StatusCode, str, str | None]] = {
    InvalidRequestError: (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", None),
    QueueFullError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", None),
    RequestFailedError: (grpc.StatusCode.INTERNAL, "REQUEST_FAILED", "the engine failed at this request"),
    EngineDeadError: (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD", _ENGINE_DEAD),
    DeviceError: (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD", _ENGINE_DEAD),
    ModelLoadError: (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD", _ENGINE_DEAD),
    ConfigError: (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD", _ENGINE_DEAD),
}


def to_refusal(error: Exception) -> Refusal:
    """Returns what a client is told of an error; an error that isn't about a request of his is logged."""
    if isinstance(error, Refusal):
        return error
    for kind, (code, reason, message) in TABLE.items():
        if isinstance(error, kind):
            return _known_refusal(error, code, reason, message)
    _logger.error("a call failed", exc_info=error)
    return Refusal(grpc.StatusCode.INTERNAL, "INTERNAL", _INTERNAL)


def _known_refusal(error: Exception, code: grpc.StatusCode, reason: str, message: str | None) -> Refusal:
    if code is grpc.StatusCode.INTERNAL:
        _logger.error("a request failed", exc_info=error)
    field = None
    if isinstance(error, InvalidRequestError):
        field = error.param
        reason = error.code.upper() if error.code is not None else reason
    retry_after_s = error.retry_after_s if isinstance(error, QueueFullError) else None
    return Refusal(code, reason, message or " ".join(str(error).split()), field=field, retry_after_s=retry_after_s)


async def abort_with(context: grpc.aio.ServicerContext, refusal: Refusal, request_id: str = "") -> NoReturn:
    """Ends the call with a refusal's code, message and details."""
    status = status_of(refusal, request_id)
    await context.abort(refusal.code, refusal.message, ((_DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort always raises")


def status_of(refusal: Refusal, request_id: str = "") -> Any:
    """Returns the google.rpc.Status of a refusal."""
    status = _Status(code=refusal.code.value[0], message=refusal.message)
    status.details.add().Pack(_ErrorInfo(reason=refusal.reason, domain=DOMAIN, metadata=refusal.metadata))
    if refusal.field is not None:
        bad_request = _BadRequest()
        bad_request.field_violations.add(field=refusal.field, description=refusal.message)
        status.details.add().Pack(bad_request)
    if refusal.retry_after_s is not None:
        retry_info = _RetryInfo()
        retry_info.retry_delay.FromMilliseconds(int(refusal.retry_after_s * 1000))
        status.details.add().Pack(retry_info)
    if request_id:
        status.details.add().Pack(_RequestInfo(request_id=request_id))
    return status
