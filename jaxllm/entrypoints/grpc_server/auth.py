"""The API key: `authorization: Bearer KEY` metadata on every call but health checks.

Unknown methods are refused like known ones, before a byte of the request is read.
"""

import hashlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc

from jaxllm.entrypoints.grpc_server import descriptors
from jaxllm.entrypoints.grpc_server.errors import Refusal, abort_with

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_OPEN_PREFIX = f"/{descriptors.HEALTH}/"
_SCHEME = "bearer "


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls through that bring one of the keys, and all calls if there are no keys."""

    def __init__(self, api_keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in api_keys]

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        metadata = handler_call_details.invocation_metadata
        is_open = not self._digests or handler_call_details.method.startswith(_OPEN_PREFIX)
        if is_open or self._has_key([value for key, value in metadata if key == "authorization"]):
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def _has_key(self, values: Sequence[Any]) -> bool:
        if len(values) != 1 or not isinstance(values[0], str) or not values[0].lower().startswith(_SCHEME):
            return False
        given = _digest(values[0][len(_SCHEME) :])
        # Each key is compared, whole, whatever came: the time tells nothing.
        return any([hmac.compare_digest(given, digest) for digest in self._digests])


async def _refuse(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
    await abort_with(
        context,
        Refusal(
            grpc.StatusCode.UNAUTHENTICATED,
            "API_KEY_INVALID",
            "this server needs an API key: send it as `authorization: Bearer KEY` metadata",
        ),
    )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
