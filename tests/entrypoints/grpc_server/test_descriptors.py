"""The descriptor set is what its .proto files say, and they say what the published contracts say."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorSet

from jaxllm.entrypoints.grpc_server import descriptors

PROTOS = Path(descriptors.__file__).parent / "protos"
# Messages that we only refuse: ours have no fields, theirs have.
SHELLS = {
    "smg.grpc.common.KvEventBatch",
    "smg.grpc.common.StartProfileRequest",
    "smg.grpc.common.SubscribeKvEventsRequest",
    "vllm.grpc.engine.KvTransferParams",
    "vllm.grpc.engine.MediaIdentity",
    "vllm.grpc.engine.MediaRefs",
    "vllm.grpc.engine.MultimodalInputs",
}


def compile_protos(folder: Path, files: list[str], out: Path) -> FileDescriptorSet:
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={folder}", "--include_imports"]
    subprocess.run([*command, f"--descriptor_set_out={out}", *files], check=True)
    return FileDescriptorSet.FromString(out.read_bytes())


def committed() -> FileDescriptorSet:
    return FileDescriptorSet.FromString((PROTOS / "descriptors.binpb").read_bytes())


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DescriptorProto]:
    """The messages of the published contracts, by full name. Only .proto files are read; nothing is imported."""
    files = metadata.files("smg-grpc-proto") or []
    folders = {Path(str(file.locate())).parent for file in files if file.name == "vllm_engine.proto"}
    (folder,) = folders
    out = tmp_path_factory.mktemp("published") / "set.binpb"
    return messages_of(compile_protos(folder, ["vllm_engine.proto"], out))


def messages_of(files: FileDescriptorSet) -> dict[str, DescriptorProto]:
    found: dict[str, DescriptorProto] = {}

    def add(prefix: str, message: DescriptorProto) -> None:
        found[f"{prefix}.{message.name}"] = message
        for nested in message.nested_type:
            add(f"{prefix}.{message.name}", nested)

    for file in files.file:
        for message in file.message_type:
            add(file.package, message)
    return found


def fields_of(message: DescriptorProto) -> dict[str, tuple[object, ...]]:
    """Name -> all that matters on the wire and to who reads the message."""

    def oneof(field: FieldDescriptorProto) -> str:
        return message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""

    return {
        field.name: (field.number, field.type, field.label, field.type_name, field.proto3_optional, oneof(field))
        for field in message.field
    }


def test_the_descriptor_set_is_what_the_proto_files_say(tmp_path: Path) -> None:
    names = sorted(path.name for path in PROTOS.glob("*.proto"))
    fresh = compile_protos(PROTOS, names, tmp_path / "set.binpb")
    assert {file.name: file for file in committed().file} == {file.name: file for file in fresh.file}, (
        "run scripts/build_protos"
    )


def test_messages_are_those_of_the_published_contract(published: dict[str, DescriptorProto]) -> None:
    ours = {
        name: message
        for name, message in messages_of(committed()).items()
        if name.startswith(("vllm.grpc.engine.", "smg.grpc.common."))
    }
    assert len(ours) > 30 and ours.keys() <= published.keys()
    for name, message in ours.items():
        if name in SHELLS:
            assert not message.field and published[name].field
        else:
            assert fields_of(message) == fields_of(published[name]), name


def test_methods_are_those_of_the_published_contract(tmp_path: Path) -> None:
    (proto,) = [file for file in metadata.files("smg-grpc-proto") or [] if file.name == "vllm_engine.proto"]
    theirs = compile_protos(Path(str(proto.locate())).parent, ["vllm_engine.proto"], tmp_path / "set.binpb")

    def methods_of(files: FileDescriptorSet) -> dict[str, tuple[object, ...]]:
        (service,) = [s for file in files.file for s in file.service if s.name == "VllmEngine"]
        return {m.name: (m.input_type, m.output_type, m.client_streaming, m.server_streaming) for m in service.method}

    assert methods_of(committed()) == methods_of(theirs)
    assert len(methods_of(theirs)) == 12
