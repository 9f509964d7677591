"""What a server may be started with, and what each mistake says."""

import socket

import pytest

from jaxllm.entrypoints.arg_parser import ArgParser
from jaxllm.entrypoints.server_settings import ServerSettings
from jaxllm.exceptions import ConfigError


def settings(*flags: str) -> ServerSettings:
    parser = ArgParser("serve", "")
    parser.add_argument("--model", default="model")
    ServerSettings.add_cli_args(parser)
    return ServerSettings.from_cli_args(parser.parse(flags))


def test_defaults_are_for_one_machine_alone() -> None:
    made = settings()
    assert (made.host, made.port, made.grpc_port, made.api_keys) == ("127.0.0.1", 8000, None, ())
    assert (made.served_model_names, made.max_queue, made.shutdown_timeout_s) == (("model",), 4096, 30.0)
    assert "127.0.0.1" in made.allowed_hosts
    assert made.allowed_origins == ()


def test_flags_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXLLM_API_KEY", "from-env")
    made = settings("--api-key", "a", "--api_key", "b", "--host", "0.0.0.0", "--served-model-name", "x", "y")
    assert made.api_keys == ("a", "b", "from-env")
    assert made.served_model_names == ("x", "y")
    assert made.allowed_hosts is None
    assert "from-env" not in repr(made)
    assert settings("--max-queue", "0").max_queue is None
    origins = ("http://localhost:3000", "https://chat.example", "http://[::1]:80", "*")
    assert settings("--allowed-origins", *origins).allowed_origins == origins


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--host", "::"], "--insecure"),
        (["--host", "example.org"], "--api-key"),
        (["--port", "70000"], "--port"),
        (["--port", "5000", "--grpc-port", "5000"], "--grpc-port"),
        (["--max-queue", "-1"], "--max-queue"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout"),
        (["--api-key", ""], "--api-key"),
        (["--allowed-origins", "chat.example"], "--allowed-origins"),
        (["--allowed-origins", "*", "https://chat.example/"], "--allowed-origins"),
        (["--allowed-origins", "https://*.example"], "--allowed-origins"),
        (["--allowed-origins", "null"], "--allowed-origins"),
    ],
)
def test_a_mistake_names_its_flag(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(*flags)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert settings("--host", host).is_loopback


def test_a_bound_port_answers_and_is_taken() -> None:
    listener = settings("--port", "0").bind()
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)), pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*--port"):
        settings("--port", str(port)).bind()
    listener.close()
