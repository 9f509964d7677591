"""Errors: the table knows every exception of ours, and the official library reads the details that we send."""

import inspect
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from jaxllm import exceptions
from jaxllm.entrypoints.admission import AdmissionControl, QueueFullError
from jaxllm.entrypoints.grpc_server.errors import TABLE, Refusal, status_of, to_refusal
from tests.fakes.grpc_servers import LONG, RunningServer, Stub, long_front_end, running_server, stub_of

DETAILS = {
    "google.rpc.ErrorInfo": error_details_pb2.ErrorInfo,
    "google.rpc.RetryInfo": error_details_pb2.RetryInfo,
    "google.rpc.BadRequest": error_details_pb2.BadRequest,
    "google.rpc.RequestInfo": error_details_pb2.RequestInfo,
}


def details_of(error: grpc.RpcError) -> dict[str, Any]:
    """Returns the details by their names' last parts, read by the official library."""
    status = rpc_status.from_call(error)
    assert status is not None and status.code == error.code().value[0] and status.message == error.details()
    found = {}
    for detail in status.details:
        name = detail.type_url.rpartition("/")[2]
        found[name.rpartition(".")[2]] = DETAILS[name].FromString(detail.value)
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def stub(server: RunningServer) -> Iterator[Stub]:
    with stub_of(server) as made:
        yield made


def test_the_table_knows_every_exception() -> None:
    ours = [
        kind
        for kind in vars(exceptions).values()
        if inspect.isclass(kind) and issubclass(kind, exceptions.JaxllmError) and kind is not exceptions.JaxllmError
    ]
    assert len(ours) >= 7
    for kind in [*ours, QueueFullError]:
        assert any(issubclass(kind, known) for known in TABLE), kind


@pytest.mark.parametrize("error", [ValueError("/home/me/secret"), exceptions.EngineDeadError("pid 7 at /tmp/x")])
def test_nothing_of_the_inside_gets_out(error: Exception) -> None:
    assert "/" not in to_refusal(error).message


def test_a_refusal_carries_all_its_details() -> None:
    refusal = Refusal(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "FULL", "no room", field="n", retry_after_s=1.25, metadata={"a": "b"}
    )
    status = status_of(refusal, "mine")
    assert (status.code, status.message) == (8, "no room")
    error_info, bad_request, retry_info, request_info = (
        DETAILS[detail.type_url.rpartition("/")[2]].FromString(detail.value) for detail in status.details
    )
    assert (error_info.reason, error_info.domain, dict(error_info.metadata)) == ("FULL", "jaxllm", {"a": "b"})
    assert (bad_request.field_violations[0].field, bad_request.field_violations[0].description) == ("n", "no room")
    assert retry_info.retry_delay.ToMilliseconds() == 1250
    assert request_info.request_id == "mine"


BAD_REQUESTS = [
    ("temperature", {"text": "a", "sampling_params": {"temperature": -1}}),
    ("temperature", {"text": "a", "sampling_params": {"temperature": float("nan")}}),
    ("top_p", {"text": "a", "sampling_params": {"top_p": 1.5}}),
    ("n", {"text": "a", "sampling_params": {"n": 10**9}}),
    ("n", {"text": "a", "sampling_params": {"n": 2, "temperature": 0}}),
    ("logprobs", {"text": "a", "sampling_params": {"logprobs": 21}}),
    ("stop", {"text": "a", "sampling_params": {"stop": [""]}}),
    ("stop_token_ids", {"text": "a", "sampling_params": {"stop_token_ids": [260]}}),
    ("max_tokens", {"text": "a", "sampling_params": {"max_tokens": 2**32 - 1}}),
    ("prompt", {"text": ""}),
    ("prompt", {}),
    ("prompt", {"text": "a" * (LONG + 100)}),
    ("prompt_token_ids", {"token_ids": {"ids": []}}),
    ("prompt_token_ids", {"token_ids": {"ids": [260]}}),
    ("prompt_token_ids", {"token_ids": {"ids": [2**32 - 1]}}),
    ("priority", {"text": "a", "priority": 1}),
    ("request_id", {"text": "a", "request_id": "a\nb"}),
    ("request_id", {"text": "a", "request_id": "a" * 129}),
]


@pytest.mark.parametrize(("field", "request_fields"), BAD_REQUESTS)
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_a_bad_request_names_its_field(stub: Stub, method: str, field: str, request_fields: dict[str, Any]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(getattr(stub, method)(**request_fields))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = details_of(caught.value)
    (violation,) = details["BadRequest"].field_violations
    assert (violation.field, violation.description) == (field, caught.value.details())
    assert details["ErrorInfo"].domain == "jaxllm" and "RetryInfo" not in details


def test_after_all_that_the_server_answers(stub: Stub) -> None:
    assert stub.Generate(text="a", sampling_params={"temperature": 0, "max_tokens": 3}).completions[0].text == "bcd"


def test_too_long_a_prompt_has_a_reason_of_its_own(stub: Stub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(text="a" * (LONG + 100))
    assert details_of(caught.value)["ErrorInfo"].reason == "CONTEXT_LENGTH_EXCEEDED"


def test_an_unknown_model(stub: Stub) -> None:
    assert stub.Generate(text="a", model="also-fake", sampling_params={"max_tokens": 1}).model == "fake"
    for call in (stub.Generate, stub.Tokenize):
        with pytest.raises(grpc.RpcError) as caught:
            call(text="a", model="other")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert caught.value.details() == "model 'other' isn't served here; served: fake, also-fake"
        assert details_of(caught.value)["ErrorInfo"].reason == "MODEL_NOT_FOUND"


def test_an_error_tells_which_request_it_is_about(stub: Stub) -> None:
    for fields in ({"request_id": "mine"}, {"metadata": [("x-request-id", "mine")]}):
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(text="", **fields)
        assert details_of(caught.value)["RequestInfo"].request_id == "mine"


def test_a_full_queue() -> None:
    admission = AdmissionControl(1)
    ticket = admission.admit(1)  # of somebody at the HTTP server, say
    with running_server(admission=admission) as server, stub_of(server) as stub:
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(text="a", sampling_params={"max_tokens": 1})
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = details_of(caught.value)
        assert details["ErrorInfo"].reason == "QUEUE_FULL"
        assert details["RetryInfo"].retry_delay.ToMilliseconds() == 1000
        ticket.start()
        stub.Generate(text="a", sampling_params={"max_tokens": 1})
        assert (admission.num_waiting, admission.num_requests) == (0, 1)


def test_while_the_model_loads_and_after_the_engine_has_died() -> None:
    gate = threading.Event()

    def load() -> Any:
        assert gate.wait(60)
        return long_front_end()

    with running_server(load, is_ready=False) as server, stub_of(server) as stub:
        for call in (stub.Generate, stub.Tokenize):
            with pytest.raises(grpc.RpcError) as caught:
                call(text="a")
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            details = details_of(caught.value)
            assert details["ErrorInfo"].reason == "MODEL_LOADING"
            assert details["ErrorInfo"].metadata["phase"] == "loading"
            assert details["RetryInfo"].retry_delay.ToMilliseconds() > 0
        assert stub.GetStatus().phase == "loading"
        assert [model.id for model in stub.ListModels().models] == ["fake", "also-fake"]
        gate.set()
        server.run(server.engine.wait_ready())
        assert stub.GetStatus().phase == "ready"
        server.engine.kill()
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(text="a")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert details_of(caught.value)["ErrorInfo"].reason == "ENGINE_DEAD"
        assert stub.GetStatus().phase == "dead"


def test_the_engine_dies_under_open_streams() -> None:
    with running_server() as server, stub_of(server) as stub:
        streams = [stub.GenerateStream(text="a", sampling_params={"max_tokens": LONG}) for _ in range(8)]
        for stream in streams:
            next(stream)
        fatal = stub.GenerateStream(text="!")  # the fake's device can't compute this
        for stream in [*streams, fatal]:
            with pytest.raises(grpc.RpcError) as caught:
                list(stream)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert details_of(caught.value)["ErrorInfo"].reason == "ENGINE_DEAD"


def test_what_isnt_implemented_says_so(server: RunningServer) -> None:
    with stub_of(server, "vllm.grpc.engine.VllmEngine") as stub:
        # The fake's tokenizer has no form in which it could be sent.
        for call in (stub.Embed, stub.StartProfile, stub.StopProfile, stub.SubscribeKvEvents, stub.GetTokenizer):
            with pytest.raises(grpc.RpcError) as caught:
                list(call())
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert details_of(caught.value)["ErrorInfo"].reason == "UNIMPLEMENTED"
