"""Message classes and service descriptors, built at import from protos/descriptors.binpb.

There is no generated code, which works with one major version of protobuf only; these work with 5, 6 and 7. They
live in a pool of their own, so that nobody else's descriptors of the same names get into the way. Imports no grpc.
"""

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor

INFERENCE = "jaxllm.v1.Inference"
VLLM_ENGINE = "vllm.grpc.engine.VllmEngine"
HEALTH = "grpc.health.v1.Health"
REFLECTIONS = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
SERVICES = (INFERENCE, VLLM_ENGINE, HEALTH, *REFLECTIONS)


def _load_pool() -> descriptor_pool.DescriptorPool:
    data = resources.files(__package__).joinpath("protos", "descriptors.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:  # each after those that it imports
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _load_pool()


def message_class(full_name: str) -> Any:
    """Returns the class of a message such as "jaxllm.v1.GenerateRequest"; its fields are known at run time only."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(full_name))


def service(full_name: str) -> ServiceDescriptor:
    return _POOL.FindServiceByName(full_name)


def file_by_name(name: str) -> FileDescriptor:
    """Returns a file of the set, such as "jaxllm.proto".

    Raises:
      KeyError: There is none of that name.
    """
    return _POOL.FindFileByName(name)


def file_containing(symbol: str) -> FileDescriptor:
    """Returns the file that declares a message, an enum, a service, or a method "package.Service.Method".

    Raises:
      KeyError: No file declares it.
    """
    try:
        return _POOL.FindFileContainingSymbol(symbol)
    except KeyError:  # it may be a method: those aren't looked up
        service_name, _, method = symbol.rpartition(".")
        found = _POOL.FindServiceByName(service_name)
        if method not in found.methods_by_name:
            raise
        return found.file
