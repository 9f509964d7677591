"""A client without stubs lists the services, generates, streams, cancels and hits a deadline."""

from collections.abc import Iterator

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.fakes.grpc_servers import LONG, RunningServer, running_server
from tests.fakes.reflection_client import ReflectionClient

INFERENCE = "jaxllm.v1.Inference"
SERVICES = [
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    "jaxllm.v1.Inference",
    "vllm.grpc.engine.VllmEngine",
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(params=["v1", "v1alpha"])
def client(server: RunningServer, request: pytest.FixtureRequest) -> Iterator[ReflectionClient]:
    with grpc.insecure_channel(server.address) as channel:
        yield ReflectionClient(channel, request.param)


def test_it_lists_the_services(client: ReflectionClient) -> None:
    assert sorted(client.list_services()) == SERVICES


def test_it_generates(client: ReflectionClient) -> None:
    request_class, generate = client.method(INFERENCE, "Generate")
    response = generate(request_class(text="abc", sampling_params={"temperature": 0, "max_tokens": 4}), timeout=60)
    (completion,) = response.completions
    assert (completion.text, list(completion.token_ids), completion.finish_reason) == ("defg", [*b"defg"], "length")
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (3, 4)
    assert response.model == "fake" and response.request_id


def test_it_streams(client: ReflectionClient) -> None:
    request_class, stream = client.method(INFERENCE, "GenerateStream")
    request = request_class(token_ids={"ids": [*b"abc"]}, sampling_params={"temperature": 0, "max_tokens": 6})
    replies = list(stream(request, timeout=60))
    assert "".join(part.text for reply in replies for part in reply.completions) == "defghi"
    assert [reply.HasField("usage") for reply in replies] == [False] * (len(replies) - 1) + [True]


def test_it_talks_the_gateways_contract(client: ReflectionClient) -> None:
    request_class, generate = client.method("vllm.grpc.engine.VllmEngine", "Generate")
    request = request_class(tokenized={"input_ids": [*b"abc"]}, sampling_params={"temperature": 0, "max_tokens": 2})
    (response,) = generate(request, timeout=60)
    assert list(response.complete.output_ids) == [*b"de"]


def test_it_cancels(server: RunningServer, client: ReflectionClient) -> None:
    request_class, stream = client.method(INFERENCE, "GenerateStream")
    call = stream(request_class(text="a", sampling_params={"n": 4, "max_tokens": LONG}), timeout=60)
    next(iter(call))
    assert server.engine.num_unfinished_requests == 1
    call.cancel()
    server.wait_until_idle()


@pytest.mark.parametrize("name", ["Generate", "GenerateStream"])
def test_it_hits_a_deadline(server: RunningServer, client: ReflectionClient, name: str) -> None:
    request_class, call = client.method(INFERENCE, name)
    request = request_class(text="a", sampling_params={"temperature": 0, "max_tokens": LONG})
    with pytest.raises(grpc.RpcError) as caught:
        answer = call(request, timeout=0.3)
        for _ in answer:
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    server.wait_until_idle()


@pytest.mark.parametrize(
    "symbol", ["jaxllm.v1.Nothing", "jaxllm.v1.Inference.Nothing", "", "jaxllm.v1.Inference.Generate.more"]
)
def test_unknown_symbols_are_an_error(client: ReflectionClient, symbol: str) -> None:
    response = client.ask(file_containing_symbol=symbol or " ")
    assert response.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert client.list_services()


def test_a_method_leads_to_its_file(client: ReflectionClient) -> None:
    response = client.ask(file_containing_symbol="jaxllm.v1.Inference.Generate")
    assert response.file_descriptor_response.file_descriptor_proto


def test_the_official_client_understands(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert sorted(database.get_services()) == SERVICES
        file = database.FindFileContainingSymbol("vllm.grpc.engine.VllmEngine")
        assert (file.package, list(file.dependency)) == ("vllm.grpc.engine", ["common.proto"])
        assert database.FindFileByName("common.proto").package == "smg.grpc.common"
        with pytest.raises(KeyError):
            database.FindFileByName("nothing.proto")
