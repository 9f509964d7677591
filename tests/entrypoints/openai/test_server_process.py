"""A server's life as its user sees it: signals, deaths, ports, exit codes; nothing may be left behind."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from jaxllm.client import Client
from tests.fakes.fake_server import ROOT, ServerProcess, health_phase, start_server

ALPHABET = "tests.fakes.fake_cores:AlphabetExecutor"
BODY = {"prompt": "a", "max_tokens": 4000, "temperature": 0, "stream": True}


class Stream:
    """A streaming request whose events are read by a thread."""

    def __init__(self, server: ServerProcess, **fields: Any) -> None:
        parts = urlsplit(server.url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)
        self._connection.request("POST", "/v1/completions", json.dumps({**BODY, **fields}))
        self.answer = self._connection.getresponse()
        self.events: list[Any] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def result(self) -> list[Any]:
        """Returns every event, once the answer has ended."""
        self._thread.join()
        return self.events

    def _read(self) -> None:
        for line in self.answer:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                self.events.append(json.loads(line[6:]))
        self._connection.close()


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with start_server(ALPHABET, "--shutdown-timeout", "1") as server:
        yield server


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_sigterm_lets_short_answers_finish_and_ends_the_rest_with_an_error(server: ServerProcess) -> None:
    streams = [Stream(server), Stream(server, max_tokens=50)]
    server.process.send_signal(signal.SIGTERM)
    server.wait_until(lambda: health_phase(server) == "draining" or server.process.poll() is not None, "draining")
    long, short = (stream.result() for stream in streams)
    assert long[-1]["error"]["code"] == "shutting_down"
    assert short[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(600) == 0


def test_a_second_signal_ends_it_at_once() -> None:
    with start_server(ALPHABET, "--shutdown-timeout", "600") as server:
        core = server.core_pid()
        Stream(server)
        server.process.send_signal(signal.SIGINT)
        server.wait_until(lambda: "draining" in server.log_text(), "draining")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(600) == 128 + signal.SIGTERM
        server.wait_until(lambda: not is_alive(core), "the core's end")


def test_when_the_core_is_killed_every_client_is_told_and_the_server_ends_with_5(server: ServerProcess) -> None:
    streams = [Stream(server) for _ in range(32)]
    os.kill(server.core_pid(), signal.SIGKILL)
    server.wait_until(lambda: server.get("/health")[0] == 503, "503")
    assert health_phase(server) == "dead"
    for stream in streams:
        assert stream.result()[-1]["error"]["code"] == "engine_dead"
    assert server.process.wait(600) == 5
    assert "Traceback" not in server.log_text()


def test_a_frozen_core_is_told_and_may_come_back(server: ServerProcess) -> None:
    stream = Stream(server, max_tokens=2000)
    core = server.core_pid()
    os.kill(core, signal.SIGSTOP)
    server.wait_until(lambda: health_phase(server) == "stalled", "a standstill")
    assert server.get("/ready")[0] == server.get("/health")[0] == 503
    assert server.get("/live")[0] == 200
    assert f"the engine process ({core}) stands still: no sign of life for 10 s; it was stopped" in server.log_text()
    os.kill(core, signal.SIGCONT)
    server.wait_until(lambda: server.get("/ready")[0] == 200, "its return")
    assert stream.result()[-1]["choices"][0]["finish_reason"] == "length"
    # Stacks would be printed only now, while the threads run, which has ended a core.
    assert "most recent call first" not in server.log_text()


@pytest.mark.parametrize("phase", ["loading", "idle", "busy"])
def test_when_the_server_is_killed_nothing_is_left(phase: str) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        start_server(ALPHABET, waits=phase != "loading", folder=folder) as server,
    ):
        server.wait_until(lambda: bool(engine_children(server)), "a core")
        cores = engine_children(server)
        if phase == "busy":
            Stream(server)
        for pid in (server.process.pid, *cores):
            assert "/dev/shm" not in Path(f"/proc/{pid}/maps").read_text()
        server.process.kill()
        server.wait_until(lambda: not any(map(is_alive, cores)), "the core's end")
        # Killed before it had heard of us, the core may still be about to remove its folder.
        server.wait_until(lambda: not list(Path(folder).iterdir()) or phase == "loading", "an empty folder")


def engine_children(server: ServerProcess) -> list[int]:
    try:
        return [server.core_pid()]
    except ValueError:
        return []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_loading_ends_it_cleanly(number: signal.Signals) -> None:
    with start_server("tests.fakes.slow_executor:SlowExecutor", waits=False) as server:
        server.wait_until(lambda: server.get("/health")[0] == 503, "loading")
        server.process.send_signal(number)
        assert server.process.wait(600) == 0
        assert "Traceback" not in server.log_text()


def run(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "jaxllm.serve", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def test_a_port_that_is_taken_is_a_usage_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = run("--model", "nothing.gguf", "--port", port)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"error: can't listen on 127.0.0.1:{port}")


def test_an_open_address_without_a_key_is_a_usage_error() -> None:
    result = run("--host", "0.0.0.0", "--port", "0")
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "--api-key" in result.stderr


def test_a_model_that_is_not_there_is_exit_code_4() -> None:
    result = run("--model", "/nowhere/model.gguf", "--port", "0")
    assert result.returncode == 4
    assert "no model '/nowhere/model.gguf'" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_http_and_grpc_share_one_engine_and_drain_together() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--grpc-port", str(port), "--api-key", "secret", "--shutdown-timeout", "60"]
    with start_server(ALPHABET, *flags) as server, Client(f"127.0.0.1:{port}", "secret", timeout_s=120) as client:
        assert client.generate("abc", max_tokens=3, temperature=0).text == "def"
        assert server.get("/v1/models")[0] == 401
        pieces = client.generate_stream("abc", max_tokens=500, temperature=0)
        first = next(pieces)
        server.process.send_signal(signal.SIGTERM)
        text = first.text + "".join(piece.text for piece in pieces)
        assert len(text) == 500
        assert server.process.wait(600) == 0
