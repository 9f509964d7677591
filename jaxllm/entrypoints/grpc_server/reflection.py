"""grpc.reflection v1 and v1alpha: clients without stubs ask for the services and their descriptors here.

The two versions differ in their package only. There are no extensions to ask for.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from jaxllm.entrypoints.grpc_server import descriptors
from jaxllm.entrypoints.grpc_server.rpc import Method


def reflection_methods(service_name: str) -> dict[str, Method]:
    """Returns the methods of one version's service."""
    package = service_name.rpartition(".")[0]
    return {"ServerReflectionInfo": _Reflection(package).server_reflection_info}


class _Reflection:
    def __init__(self, package: str) -> None:
        self._response_class = descriptors.message_class(f"{package}.ServerReflectionResponse")

    async def server_reflection_info(
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        async for request in requests:
            yield self._answer(request)

    def _answer(self, request: Any) -> Any:
        response = self._response_class(valid_host=request.host, original_request=request)
        match request.WhichOneof("message_request"):
            case "list_services":
                for name in descriptors.SERVICES:
                    response.list_services_response.service.add(name=name)
            case "file_by_filename":
                self._add_files(response, descriptors.file_by_name, request.file_by_filename)
            case "file_containing_symbol":
                self._add_files(response, descriptors.file_containing, request.file_containing_symbol)
            case "file_containing_extension" | "all_extension_numbers_of_type":
                _set_error(response, grpc.StatusCode.NOT_FOUND, "there are no extensions")
            case _:
                _set_error(response, grpc.StatusCode.INVALID_ARGUMENT, "the request asks for nothing")
        return response

    def _add_files(self, response: Any, find: Callable[[str], FileDescriptor], name: str) -> None:
        try:
            file = find(name)
        except KeyError:
            _set_error(response, grpc.StatusCode.NOT_FOUND, f"{name:.200} isn't known")
            return
        for needed in _with_imports(file):
            proto = FileDescriptorProto()
            needed.CopyToProto(proto)
            response.file_descriptor_response.file_descriptor_proto.append(proto.SerializeToString())


def _with_imports(file: FileDescriptor) -> list[FileDescriptor]:
    """Returns the file and, behind it, all that it imports, each once."""
    files = {file.name: file}
    waiting = [file]
    while waiting:
        for imported in waiting.pop().dependencies:
            if imported.name not in files:
                files[imported.name] = imported
                waiting.append(imported)
    return list(files.values())


def _set_error(response: Any, code: grpc.StatusCode, message: str) -> None:
    response.error_response.error_code = code.value[0]
    response.error_response.error_message = message
