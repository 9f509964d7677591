"""Methods of ours -> handlers of grpc. Each method either returns one message or yields many, and may simply raise.

What it raises becomes a status by errors.py. A generator is closed as soon as its call ends, however it ends: that is
what aborts the request behind it. Doesn't know what the services do.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message

from jaxllm.entrypoints.grpc_server import descriptors
from jaxllm.entrypoints.grpc_server.errors import Refusal, abort_with, to_refusal

STALL_S = 30.0  # a client that takes nothing for so long is given up

# (request or requests, context) -> response or responses.
Method = Callable[[Any, grpc.aio.ServicerContext], Any]
_Handler = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]


def service_handler(service_name: str, methods: Mapping[str, Method]) -> grpc.GenericRpcHandler:
    """Returns the handler of a service. Methods of it that aren't in `methods` answer UNIMPLEMENTED.

    Args:
      service_name: A service that descriptors.py knows.
      methods: Name -> coroutine function, or async generator function where the service streams responses.
    """
    service = descriptors.service(service_name)
    known = {method.name for method in service.methods}
    if not methods.keys() <= known:
        raise ValueError(f"{service_name} has no method {sorted(methods.keys() - known)[0]}")
    handlers = {
        method.name: _method_handler(method, methods.get(method.name) or _unimplemented(method))
        for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service_name, handlers)


def request_id_of(request: Any, context: grpc.aio.ServicerContext) -> str:
    """Returns the name that the caller gave this request, in the message or in x-request-id metadata; else ""."""
    if "request_id" in request.DESCRIPTOR.fields_by_name and request.request_id:
        return str(request.request_id)
    for key, value in context.invocation_metadata() or ():
        if key == "x-request-id" and isinstance(value, str):
            return value
    return ""


def _method_handler(method: MethodDescriptor, function: Method) -> grpc.RpcMethodHandler:
    make_handler = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[method.client_streaming, method.server_streaming]
    parse = _parser(method)
    # Requests come as bytes: what can't be parsed is then refused like other mistakes.
    return make_handler(
        _streaming(parse, function) if method.server_streaming else _unary(parse, function),
        response_serializer=descriptors.message_class(method.output_type.full_name).SerializeToString,
    )


def _parser(method: MethodDescriptor) -> Callable[[Any], Any]:
    """Returns what makes a message of bytes, or a stream of messages of a stream of bytes."""
    request_class = descriptors.message_class(method.input_type.full_name)

    def parse(data: bytes) -> Any:
        try:
            return request_class.FromString(data)
        except DecodeError:
            raise Refusal(
                grpc.StatusCode.INVALID_ARGUMENT,
                "MALFORMED_MESSAGE",
                f"the request is no {request_class.DESCRIPTOR.name}",
            ) from None

    async def parse_each(pieces: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in pieces:
            yield parse(data)

    return parse_each if method.client_streaming else parse


def _unary(parse: Callable[[Any], Any], function: Method) -> _Handler:
    async def handle(data: Any, context: grpc.aio.ServicerContext) -> Any:
        request = None
        try:
            request = parse(data)
            return await function(request, context)
        except Exception as error:
            await _refuse(error, request, context)

    return handle


def _streaming(parse: Callable[[Any], Any], function: Method) -> _Handler:
    async def handle(data: Any, context: grpc.aio.ServicerContext) -> None:
        request = None
        try:
            request = parse(data)
            async with aclosing(function(request, context)) as responses:
                async for response in responses:
                    await _write(response, context)
        except Exception as error:
            await _refuse(error, request, context)

    return handle


async def _write(response: Any, context: grpc.aio.ServicerContext) -> None:
    try:
        async with asyncio.timeout(STALL_S):
            await context.write(response)
    except TimeoutError:
        raise Refusal(grpc.StatusCode.ABORTED, "SLOW_READER", f"nothing was read for {STALL_S:g} s") from None


async def _refuse(error: Exception, request: Any, context: grpc.aio.ServicerContext) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    request_id = request_id_of(request, context) if isinstance(request, Message) else ""
    await abort_with(context, to_refusal(error), request_id)


def _unimplemented(method: MethodDescriptor) -> Method:
    refusal = Refusal(grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED", f"{method.name} isn't implemented by jaxllm")

    async def refuse(request: Any, context: grpc.aio.ServicerContext) -> Any:
        raise refusal

    async def refuse_stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        yield await refuse(request, context)

    return refuse_stream if method.server_streaming else refuse
