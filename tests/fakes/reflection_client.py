"""A gRPC client that has no stubs: it learns services and messages from the server. Imports nothing of jaxllm.

The reflection protocol's own messages, which any such client must know, are written down here by hand.
"""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_STRING, _BYTES, _INT32, _MESSAGE = 9, 12, 5, 11
_ONE, _MANY = 1, 3


def _reflection_classes(package: str) -> tuple[Any, Any]:
    """Returns the request's and the response's class, with the fields that are needed here."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.by_hand.proto", package=package, syntax="proto3")

    def add(name: str, *fields: tuple[str, int, int, int, str]) -> None:
        message = file.message_type.add(name=name)
        for field_name, number, kind, label, type_name in fields:
            full = f".{package}.{type_name}" if type_name else None
            message.field.add(name=field_name, number=number, type=kind, label=label, type_name=full)

    add("Request", ("file_containing_symbol", 4, _STRING, _ONE, ""), ("list_services", 7, _STRING, _ONE, ""))
    add("Files", ("file_descriptor_proto", 1, _BYTES, _MANY, ""))
    add("Service", ("name", 1, _STRING, _ONE, ""))
    add("Services", ("service", 1, _MESSAGE, _MANY, "Service"))
    add("Error", ("error_code", 1, _INT32, _ONE, ""), ("error_message", 2, _STRING, _ONE, ""))
    add(
        "Response",
        ("file_descriptor_response", 4, _MESSAGE, _ONE, "Files"),
        ("list_services_response", 6, _MESSAGE, _ONE, "Services"),
        ("error_response", 7, _MESSAGE, _ONE, "Error"),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    request, response = (pool.FindMessageTypeByName(f"{package}.{name}") for name in ("Request", "Response"))
    return message_factory.GetMessageClass(request), message_factory.GetMessageClass(response)


class ReflectionClient:
    """Args: version: "v1" or "v1alpha"."""

    def __init__(self, channel: grpc.Channel, version: str) -> None:
        self._channel = channel
        package = f"grpc.reflection.{version}"
        self._request_class, response_class = _reflection_classes(package)
        self._ask = channel.stream_stream(
            f"/{package}.ServerReflection/ServerReflectionInfo",
            request_serializer=self._request_class.SerializeToString,
            response_deserializer=response_class.FromString,
        )
        self._pool = descriptor_pool.DescriptorPool()
        self._known: set[str] = set()

    def list_services(self) -> list[str]:
        response = self.ask(list_services="*")
        return [service.name for service in response.list_services_response.service]

    def ask(self, **field: str) -> Any:
        """Returns the answer to one question."""
        return next(iter(self._ask(iter([self._request_class(**field)]), timeout=60)))

    def method(self, service_name: str, name: str) -> tuple[Any, Callable[..., Any]]:
        """Returns a method's request class and what calls it, as the server describes them."""
        self._learn(service_name)
        method = self._pool.FindServiceByName(service_name).methods_by_name[name]
        request_class = message_factory.GetMessageClass(method.input_type)
        response_class = message_factory.GetMessageClass(method.output_type)
        make = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        return request_class, make(
            f"/{service_name}/{name}",
            request_serializer=request_class.SerializeToString,
            response_deserializer=response_class.FromString,
        )

    def _learn(self, symbol: str) -> None:
        response = self.ask(file_containing_symbol=symbol)
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(data)
            for data in response.file_descriptor_response.file_descriptor_proto
        ]
        for file in _imports_first({file.name: file for file in files}):
            if file.name not in self._known:
                self._known.add(file.name)
                self._pool.AddSerializedFile(file.SerializeToString())


def _imports_first(files: dict[str, Any]) -> Iterator[Any]:
    while files:
        ready = [file for file in files.values() if not any(name in files for name in file.dependency)]
        assert ready, "a file imports one that didn't come"
        for file in ready:
            del files[file.name]
            yield file
