"""jaxllm.client against a server on a fake engine."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxllm.client import Client, ServerError
from jaxllm.entrypoints.admission import AdmissionControl
from jaxllm.exceptions import EngineDeadError, InvalidRequestError
from tests.fakes.grpc_servers import LONG, RunningServer, long_front_end, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(api_keys=["secret"]) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.address, "secret", timeout_s=60) as made:
        yield made


def test_generate(client: Client) -> None:
    reply = client.generate("abc", max_tokens=3, temperature=0)
    assert reply.text == "def" and reply.message.usage.completion_tokens == 3
    assert client.generate([*b"abc"], max_tokens=3, temperature=0).text == "def"
    assert client.generate("abc", max_tokens=9, temperature=0, stop="gh").text == "def"
    assert len(client.generate("abc", n=3, max_tokens=1).message.completions) == 3


def test_generate_stream(client: Client) -> None:
    pieces = list(client.generate_stream("abc", max_tokens=30, temperature=0))
    assert "".join(piece.text for piece in pieces) == client.generate("abc", max_tokens=30, temperature=0).text
    assert pieces[-1].message.usage.completion_tokens == 30


def test_chat(client: Client) -> None:
    reply = client.chat("abc", max_tokens=5, temperature=0)
    assert reply.text == client.generate("<user>abc\n<assistant>", max_tokens=5, temperature=0).text
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "abc"}]
    pieces = client.chat_stream(messages, max_tokens=5, temperature=0)
    assert "".join(piece.text for piece in pieces) == client.chat(messages, max_tokens=5, temperature=0).text


def test_leaving_a_stream_ends_the_request(server: RunningServer, client: Client) -> None:
    for piece in client.generate_stream("a", max_tokens=LONG, temperature=0):
        assert piece.text
        break
    server.wait_until_idle()


def test_abort(server: RunningServer, client: Client) -> None:
    stream = client.generate_stream("a", request_id="mine", max_tokens=LONG, temperature=0)
    next(stream)
    assert client.abort("mine", "nobody's") == ["mine"]
    assert list(stream)[-1].message.completions[0].finish_reason == "abort"
    server.wait_until_idle()


def test_tokens_models_status(client: Client) -> None:
    assert client.tokenize("ab") == [97, 98] and client.detokenize([97, 98]) == "ab"
    assert client.list_models() == ["fake", "also-fake"]
    assert client.status().phase == "ready"
    client.wait_ready()


def test_errors_are_exceptions_of_ours(server: RunningServer, client: Client) -> None:
    for call in (client.generate, lambda prompt, **params: list(client.generate_stream(prompt, **params))):
        with pytest.raises(InvalidRequestError, match="temperature must be at least 0") as caught:
            call("a", temperature=-1)
        assert caught.value.param == "temperature"
    with pytest.raises(InvalidRequestError, match="unknown sampling parameter max_token; known: n, temperature"):
        client.generate("a", max_token=3)
    with pytest.raises(InvalidRequestError, match="wrong kind"):
        client.generate("a", max_tokens="three")
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        client.generate([])
    with Client(server.address, "wrong") as stranger, pytest.raises(ServerError) as refused:
        stranger.status()
    assert (refused.value.code, refused.value.reason) == ("UNAUTHENTICATED", "API_KEY_INVALID")


def test_a_deadline(server: RunningServer) -> None:
    with Client(server.address, "secret", timeout_s=0.3) as hurried, pytest.raises(ServerError) as caught:
        hurried.generate("a", max_tokens=LONG, temperature=0)
    assert caught.value.code == "DEADLINE_EXCEEDED"
    server.wait_until_idle()


def test_a_full_queue() -> None:
    admission = AdmissionControl(1)
    admission.admit(1)
    with running_server(admission=admission) as server, Client(server.address) as client:
        with pytest.raises(ServerError) as caught:
            client.generate("a")
        assert (caught.value.code, caught.value.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert caught.value.retry_after_s == 1


def test_waiting_for_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.client._POLL_S", 0.01)
    gate = threading.Event()
    threading.Timer(0.1, gate.set).start()
    with running_server(lambda: gate.wait(60) and long_front_end(), is_ready=False) as server:
        with Client(server.address) as client:
            client.wait_ready()
            assert client.status().phase == "ready"
            server.engine.kill()
            with pytest.raises(EngineDeadError, match="the server's engine has failed"):
                client.wait_ready()


def test_nobody_there() -> None:
    with Client("127.0.0.1:1") as client:
        with pytest.raises(ServerError) as caught:
            client.generate("a")
        assert caught.value.code == "UNAVAILABLE"
        with pytest.raises(TimeoutError, match="isn't ready after 0 s"):
            client.wait_ready(timeout_s=0)


def test_it_loads_no_engine() -> None:
    heavy = ("jax", "numpy", "tokenizers", "jaxllm.engine", "fastapi")
    code = f"import sys, jaxllm.client; print(*[name for name in {heavy} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True
    )
    assert result.stdout.strip() == ""
