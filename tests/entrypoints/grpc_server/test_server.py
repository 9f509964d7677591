"""The server as a whole: keys, ports, names, aborts, drain, readers that don't read."""

import datetime
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from jaxllm.entrypoints.grpc_server import descriptors, rpc
from jaxllm.entrypoints.grpc_server.server import MAX_REQUEST_BYTES
from jaxllm.entrypoints.tls import TlsFiles
from jaxllm.exceptions import ConfigError
from tests.fakes.certificates import make_certificate
from tests.fakes.grpc_servers import LONG, RunningServer, Stub, running_server, stub_of

ENDLESS = {"temperature": 0, "max_tokens": LONG}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def stub(server: RunningServer) -> Iterator[Stub]:
    with stub_of(server) as made:
        yield made


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningServer]:
    with running_server(api_keys=["first key", "second"]) as running:
        yield running


METHODS = [
    (service_name, method.name)
    for service_name in descriptors.SERVICES
    for method in descriptors.service(service_name).methods
]
BAD_KEYS = [
    [],
    [("authorization", "Bearer ")],
    [("authorization", "Bearer wrong")],
    [("authorization", "Bearer first")],
    [("authorization", "Bearer first key ")],
    [("authorization", "first key")],
    [("authorization", "Basic second")],
    [("authorization", "Bearer second"), ("authorization", "Bearer second")],
    [("x-api-key", "second")],
]


def call_raw(channel: grpc.Channel, path: str, metadata: Any = ()) -> grpc.StatusCode:
    """Sends an empty message to any method and returns the status."""
    call = channel.stream_stream(path)(iter([b""]), metadata=metadata, timeout=60)
    try:
        next(iter(call), None)
        call.cancel()
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize(("service_name", "method"), METHODS)
def test_every_method_but_health_needs_a_key(guarded: RunningServer, service_name: str, method: str) -> None:
    with grpc.insecure_channel(guarded.address) as channel:
        is_refused = call_raw(channel, f"/{service_name}/{method}") is grpc.StatusCode.UNAUTHENTICATED
    assert is_refused == (service_name != descriptors.HEALTH)


@pytest.mark.parametrize("metadata", BAD_KEYS)
def test_wrong_keys(guarded: RunningServer, metadata: list[tuple[str, str]]) -> None:
    with stub_of(guarded) as stub, pytest.raises(grpc.RpcError) as caught:
        stub.ListModels(metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("path", ["/nothing/Nothing", "/", "/jaxllm.v1.Inference/", "/grpc.health.v1.Health2/Check"])
def test_unknown_methods_need_a_key_too(guarded: RunningServer, path: str) -> None:
    with grpc.insecure_channel(guarded.address) as channel:
        assert call_raw(channel, path) in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)


@pytest.mark.parametrize("value", ["Bearer first key", "bearer second", "BEARER second"])
def test_right_keys(guarded: RunningServer, value: str) -> None:
    with stub_of(guarded) as stub:
        assert stub.ListModels(metadata=[("authorization", value)]).models


def test_keys_are_not_shown(guarded: RunningServer) -> None:
    assert "second" not in repr(guarded.settings) and "fake" in repr(guarded.settings)


def test_a_port_in_use(server: RunningServer) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1:{server.handle.port}: Address already in use; .*--grpc-port"):
        with running_server(port=server.handle.port):
            pass


def test_a_socket_in_the_file_system(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/grpc.sock"
    with running_server(host=address) as server, grpc.insecure_channel(address) as channel:
        assert server.handle.port == 0
        assert Stub(channel, descriptors.INFERENCE).GetStatus().phase == "ready"


def test_an_address_of_ip_version_6() -> None:
    with running_server(host="::1") as server, grpc.insecure_channel(f"[::1]:{server.handle.port}") as channel:
        assert Stub(channel, descriptors.INFERENCE).GetStatus().phase == "ready"


def test_tls_both_ways(tmp_path: Path) -> None:
    (chain, key), (client_chain, client_key) = (make_certificate(tmp_path, name) for name in ("server", "client"))
    credentials = grpc.ssl_channel_credentials(
        chain.read_bytes(), private_key=client_key.read_bytes(), certificate_chain=client_chain.read_bytes()
    )
    stranger = grpc.ssl_channel_credentials(chain.read_bytes())
    tls = TlsFiles(certfile=str(chain), keyfile=str(key), ca_certs=str(client_chain))
    with running_server(tls=tls) as server:
        with grpc.secure_channel(server.address, credentials) as channel:
            assert Stub(channel, descriptors.INFERENCE).GetStatus().phase == "ready"
        for bad_channel in (grpc.secure_channel(server.address, stranger), grpc.insecure_channel(server.address)):
            with bad_channel, pytest.raises(grpc.RpcError) as caught:
                Stub(bad_channel, descriptors.INFERENCE).GetStatus()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_too_large_a_request(stub: Stub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(text="a" * (MAX_REQUEST_BYTES + 1))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert stub.GetStatus().phase == "ready"


@pytest.mark.parametrize("service_name", [descriptors.INFERENCE, descriptors.VLLM_ENGINE])
def test_bytes_that_are_no_message(server: RunningServer, service_name: str) -> None:
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(f"/{service_name}/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff\xff\xff", timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "the request is no GenerateRequest"
        assert Stub(channel, descriptors.INFERENCE).GetStatus().phase == "ready"


def test_two_requests_may_have_one_name_and_abort_ends_both(server: RunningServer, stub: Stub) -> None:
    streams = [stub.GenerateStream(text="a", request_id="same", sampling_params=ENDLESS) for _ in range(2)]
    other = stub.GenerateStream(text="a", request_id="other", sampling_params=ENDLESS)
    for stream in [*streams, other]:
        assert next(stream).completions[0].text[0] == "b"
    assert list(stub.Abort(request_ids=["same", "nothing", "same"]).aborted_request_ids) == ["same"]
    for stream in streams:
        last = list(stream)[-1]
        assert last.completions[0].finish_reason == "abort" and last.request_id == "same"
    next(other)
    other.cancel()
    server.wait_until_idle()
    assert list(stub.Abort(request_ids=["same", "other"]).aborted_request_ids) == []


def test_abort_reaches_a_call_that_doesnt_stream(server: RunningServer, stub: Stub) -> None:
    replies: list[Any] = []
    caller = threading.Thread(
        target=lambda: replies.append(stub.Generate(text="a", request_id="mine", sampling_params=ENDLESS))
    )
    caller.start()
    deadline_s = time.monotonic() + 30
    while not stub.Abort(request_ids=["mine"]).aborted_request_ids:
        assert time.monotonic() < deadline_s
    caller.join(30)
    assert replies[0].completions[0].finish_reason == "abort"
    server.wait_until_idle()


def test_a_request_may_be_named_by_metadata(stub: Stub) -> None:
    one_token = {"max_tokens": 1}
    for given, expected in (("mine-1", "mine-1"), ("not a name", None)):
        reply = stub.Generate(text="a", sampling_params=one_token, metadata=[("x-request-id", given)])
        assert reply.request_id == expected or expected is None and reply.request_id.startswith("req-")


def test_chat_is_generate_with_the_template(stub: Stub) -> None:
    messages = [{"role": "user", "content": "abc"}]
    params = {"temperature": 0, "max_tokens": 5, "logprobs": 1}
    prompt_ids = list(stub.Tokenize(messages=messages).token_ids)
    assert bytes(prompt_ids) == b"<user>abc\n<assistant>"
    plain = stub.Generate(token_ids={"ids": prompt_ids}, sampling_params=params)
    chat = stub.Chat(messages=messages, sampling_params=params)
    (choice,), (completion,) = chat.choices, plain.completions
    assert (choice.message.role, choice.message.content) == ("assistant", completion.text)
    assert (choice.token_ids, choice.finish_reason) == (completion.token_ids, completion.finish_reason)
    assert choice.logprobs == completion.logprobs and len(choice.logprobs) == 5
    assert chat.usage.prompt_tokens == plain.usage.prompt_tokens
    pieces = [part for reply in stub.ChatStream(messages=messages, sampling_params=params) for part in reply.choices]
    assert "".join(part.message.content for part in pieces) == completion.text
    assert [part.message.role for part in pieces] == ["assistant"] + [""] * (len(pieces) - 1)
    assert [score for part in pieces for score in part.logprobs] == list(completion.logprobs)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("messages", {}),
        ("messages", {"messages": [{"role": "user", "content": "a"}] * 4097}),
        (
            "prompt_logprobs",
            {"messages": [{"role": "user", "content": "a"}], "sampling_params": {"prompt_logprobs": 0}},
        ),
    ],
)
def test_bad_conversations(stub: Stub, field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Chat(**fields)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and field in caught.value.details()


def test_tokens_there_and_back(stub: Stub) -> None:
    reply = stub.Tokenize(text="Grüße")
    assert (bytes(reply.token_ids), reply.max_model_len) == ("Grüße".encode(), LONG + 100)
    assert stub.Detokenize(token_ids=reply.token_ids).text == "Grüße"
    assert stub.Detokenize(token_ids=[256, 97, 257]).text == "<s>a</s>"
    assert stub.Detokenize(token_ids=[256, 97, 257], skip_special_tokens=True).text == "a"
    assert stub.Detokenize(token_ids=[2**32 - 1]).text == ""
    without = stub.Tokenize(messages=[{"role": "user", "content": "a"}], add_generation_prompt=False)
    assert bytes(without.token_ids) == b"<user>a\n"
    for fields in ({}, {"text": "a", "messages": [{"role": "user", "content": "a"}]}):
        with pytest.raises(grpc.RpcError, match="one of the two"):
            stub.Tokenize(**fields)


def test_status_and_models(server: RunningServer, stub: Stub) -> None:
    status = stub.GetStatus()
    assert (status.phase, status.model, status.HasField("percent")) == ("ready", "fake", False)
    models = stub.ListModels().models
    assert [(model.id, model.root, model.max_model_len) for model in models] == [
        ("fake", "fake.gguf", LONG + 100),
        ("also-fake", "fake.gguf", LONG + 100),
    ]
    created = datetime.datetime.fromtimestamp(models[0].created, datetime.UTC)
    assert abs(datetime.datetime.now(datetime.UTC) - created) < datetime.timedelta(hours=1)


def test_many_streams_half_of_them_dropped(server: RunningServer, stub: Stub) -> None:
    params = {"seed": 7, "n": 2, "max_tokens": 200}
    alone = [part.text for part in stub.Generate(text="a", sampling_params=params).completions]
    streams = [stub.GenerateStream(text="a", sampling_params=params) for _ in range(40)]
    texts = [["", ""] for _ in streams]
    for index, stream in enumerate(streams):
        for count, reply in enumerate(stream):
            for part in reply.completions:
                texts[index][part.index] += part.text
            if index % 2 and count == index:
                stream.cancel()
                break
    assert [text for index, text in enumerate(texts) if index % 2 == 0] == [alone] * 20
    server.wait_until_idle()


def test_requests_are_logged_where_that_is_asked_for() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("jaxllm.entrypoints.grpc_server.engine_door")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        for is_wanted in (True, False):
            with running_server(logs_requests=is_wanted) as server, stub_of(server) as stub:
                stub.Generate(text="secret", request_id="one", sampling_params={"max_tokens": 1})
                stream = stub.GenerateStream(text="secret", request_id="two", sampling_params=ENDLESS)
                next(stream)
                assert stub.GetStatus().num_running == 1
                stream.cancel()
                server.wait_until_idle()
                assert stub.GetStatus().num_running == 0
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert [line.partition(" after ")[0] for line in lines] == [
        "one: gRPC request finished",
        "two: gRPC request not finished",
    ]


def test_stop_lets_requests_finish_and_refuses_new_ones() -> None:
    with running_server() as server, stub_of(server) as stub:
        short = stub.GenerateStream(text="a", sampling_params={"temperature": 0, "max_tokens": 500})
        long = stub.GenerateStream(text="a", sampling_params=ENDLESS, request_id="long")
        next(short), next(long)
        stopping = threading.Thread(target=lambda: server.run(server.handle.stop(60)))
        stopping.start()
        with pytest.raises(grpc.RpcError) as caught:
            while True:
                stub.Generate(text="a", sampling_params={"max_tokens": 1})
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "the server is shutting down and takes no further request"
        assert [reply.completions[0].finish_reason for reply in short][-1] == "length"
        assert short.code() is grpc.StatusCode.OK
        next(long)
        stub.Abort(request_ids=["long"])
        assert [reply.completions[0].finish_reason for reply in long][-1] == "abort"
        stopping.join(30)
        assert not stopping.is_alive()


def test_stop_ends_what_doesnt_finish() -> None:
    with running_server() as server, stub_of(server) as stub:
        running = stub.GenerateStream(text="a", sampling_params=ENDLESS)
        next(running)
        server.run(server.handle.stop(0.2))
        with pytest.raises(grpc.RpcError) as caught:
            list(running)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "shut down before the request was finished" in caught.value.details()
        server.wait_until_idle()


def test_a_client_that_doesnt_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "STALL_S", 0.5)
    small_window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))  # else it buffers megabytes
    with running_server() as server, grpc.insecure_channel(server.address, small_window) as channel:
        call = channel.unary_stream(f"/{descriptors.INFERENCE}/GenerateStream")
        request = descriptors.message_class("jaxllm.v1.GenerateRequest")(text="a", sampling_params=ENDLESS)
        unread = call(request.SerializeToString(), timeout=60)
        deadline_s = time.monotonic() + 30
        while not server.engine.num_unfinished_requests:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        server.wait_until_idle(40)
        with pytest.raises(grpc.RpcError):
            for _ in unread:
                pass
