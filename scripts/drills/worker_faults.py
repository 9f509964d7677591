"""A worker process is killed, or frozen, in the middle of a step of a server with open streams.

The promises: 5 s until every stream has its error; then exit code 5, and no process, shared memory or socket is left.
"""

import json
import os
import random
import signal
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import psutil

from tests.fakes.fake_server import ServerProcess, start_server

_NUM_STREAMS = 8
_REPORT_S = 5.0
_END_S = 10.0
_EXIT_CODE = 5
_EXECUTOR = "tests.fakes.fake_workers:alphabet_mp"


def kill_worker(rng: random.Random) -> float:
    """Returns the seconds until every stream had its error."""
    return _drill(rng, signal.SIGKILL)


def freeze_worker(rng: random.Random) -> float:
    return _drill(rng, signal.SIGSTOP)


def _drill(rng: random.Random, signal_number: int) -> float:
    with tempfile.TemporaryDirectory(prefix="kill-drill-") as folder:
        shm = set(os.listdir("/dev/shm"))
        with start_server(_EXECUTOR, folder=folder) as server:
            family = psutil.Process(server.process.pid).children(recursive=True)
            workers = psutil.Process(server.core_pid()).children()
            assert len(workers) == 2, workers
            streams = [Stream(server) for _ in range(_NUM_STREAMS)]
            time.sleep(0.2 + rng.random())
            rng.choice(workers).send_signal(signal_number)
            hit_s = time.monotonic()
            ended_s = [stream.wait() for stream in streams]
            elapsed_s = max(ended_s) - hit_s
            assert elapsed_s < _REPORT_S, elapsed_s
            assert server.process.wait(_END_S) == _EXIT_CODE, server.process.returncode
            gone, alive = psutil.wait_procs(family, timeout=_END_S)
            assert not alive, alive
        assert set(os.listdir("/dev/shm")) == shm
        assert not list(Path(folder).iterdir()), list(Path(folder).iterdir())
    return elapsed_s


class Stream:
    """A completion that goes on for a long time, read on a thread of its own."""

    def __init__(self, server: ServerProcess) -> None:
        body = {"model": "fake", "prompt": "a", "max_tokens": 4000, "temperature": 0, "stream": True}
        self._request = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        self._has_begun = threading.Event()
        self._events: list[bytes] = []
        self._ended_s = 0.0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self._has_begun.wait()

    def _read(self) -> None:
        with urllib.request.urlopen(self._request) as answer:
            for line in answer:
                self._has_begun.set()
                if line.strip():
                    self._events.append(line)
        self._ended_s = time.monotonic()

    def wait(self) -> float:
        """Returns when it ended, which must be with an error."""
        self._thread.join()
        assert any(b'"error"' in event for event in self._events[-2:]), self._events[-2:]
        return self._ended_s
