"""A real server process whose model is a fake: `python -m tests.fakes.fake_server EXECUTOR [FLAGS OF jaxllm.serve]`.

The core runs in a process of its own, as always. `start_server` starts it and waits until it is ready.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.entrypoints.arg_parser import ArgParser
from jaxllm.entrypoints.openai.http_server import run_servers
from jaxllm.entrypoints.server_settings import ServerSettings
from jaxllm.logger import configure_for_server
from jaxllm.serve import grpc_starter
from tests.fakes.fake_cores import fake_config, fake_front_end

ROOT = Path(__file__).parents[2]
_WAIT_S = 600.0
_MAX_TURNS = 2400


def main(argv: Sequence[str]) -> int:
    parser = ArgParser("fake_server", "A server whose model is a fake.")
    parser.add_argument("executor")
    parser.add_argument("--model", default="fake")
    parser.add_argument("--max-model-len", type=int, default=4096)
    ServerSettings.add_cli_args(parser)
    args = parser.parse(argv)
    configure_for_server(args.log_format)
    settings = ServerSettings.from_cli_args(args)
    parts = fake_front_end(fake_config(args.executor, args.max_model_len))
    return run_servers(AsyncLLMEngine(lambda: parts), settings, settings.bind(), grpc_starter(settings, "fake"))


@dataclass
class ServerProcess:
    process: "subprocess.Popen[bytes]"
    url: str
    log: IO[bytes]

    def get(self, path: str) -> Any:
        """Returns an answer's status and body."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=_WAIT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def log_text(self) -> str:
        return Path(self.log.name).read_text(encoding="utf-8")

    def core_pid(self) -> int:
        """Returns the process that the engine core runs in."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for child in children for pid in child.read_text().split()]
        (pid,) = [pid for pid in pids if b"engine_core_proc" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return pid

    def wait_until(self, is_so: Any, what: str) -> None:
        # Counted in turns: a machine that stood still for a while must not look like a server that hangs.
        for _ in range(_MAX_TURNS):
            if is_so():
                return
            time.sleep(0.05)
        raise AssertionError(f"never: {what}\n{self.log_text()}")


@contextmanager
def start_server(executor: str, *flags: str, waits: bool = True, folder: str | None = None) -> Iterator[ServerProcess]:
    """Starts a server on a free port; ends it, and prints its log, when the test has ended.

    Args:
      executor: "module:class".
      *flags: Of jaxllm.serve.
      waits: Whether to wait until it is ready.
      folder: Where it makes its temporary files, if not in the usual place.
    """
    command = [sys.executable, "-m", "tests.fakes.fake_server", executor, "--port", "0", *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAXLLM_")}
    if folder is not None:
        environment["TMPDIR"] = folder
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = subprocess.Popen(command, cwd=ROOT, stderr=log, stdout=log, env=environment)
        server = ServerProcess(process, "", log)
        try:
            server.wait_until(lambda: process.poll() is not None or "HTTP on" in server.log_text(), "a port")
            match = re.search(r"HTTP on ([0-9.]+:[0-9]+)", server.log_text())
            assert match is not None, server.log_text()
            server.url = f"http://{match[1]}"
            if waits:
                server.wait_until(lambda: server.get("/health")[0] == 200, "ready")
            yield server
        finally:
            process.kill()
            process.wait()
            sys.stderr.write(server.log_text())


def health_phase(server: ServerProcess) -> str:
    phase: str = json.loads(server.get("/health")[1])["phase"]
    return phase


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
