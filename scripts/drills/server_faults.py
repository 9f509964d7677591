"""A server with 32 open streams loses its core, or is killed itself, by kill -9.

The promises: 2 s until every stream has its error and /health says 503, exit code 5 within 10 s; 5 s until nothing is
left of a killed server.
"""

import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from scripts.drills.worker_faults import Stream
from tests.fakes.fake_server import ServerProcess, start_server

_NUM_STREAMS = 32
_REPORT_S = 2.0
_END_S = 10.0
_NOTHING_LEFT_S = 5.0
_EXIT_CODE = 5
_EXECUTOR = "tests.fakes.fake_cores:AlphabetExecutor"


def kill_core(rng: random.Random) -> float:
    """Returns the seconds until every stream had its error and /health said 503."""
    with _busy_server(rng) as (server, streams, family):
        os.kill(server.core_pid(), signal.SIGKILL)
        hit_s = time.monotonic()
        while server.get("/health")[0] != 503:
            time.sleep(0.01)
        elapsed_s = max(time.monotonic(), *(stream.wait() for stream in streams)) - hit_s
        assert elapsed_s < _REPORT_S, elapsed_s
        assert server.process.wait(_END_S) == _EXIT_CODE, server.process.returncode
        assert time.monotonic() - hit_s < _END_S
        _, alive = psutil.wait_procs(family, timeout=_END_S)
        assert not alive, alive
    return elapsed_s


def kill_server(rng: random.Random) -> float:
    """Returns the seconds until no process was left."""
    with _busy_server(rng) as (server, _, family):
        server.process.kill()
        hit_s = time.monotonic()
        _, alive = psutil.wait_procs(family, timeout=_NOTHING_LEFT_S)
        assert not alive, alive
        elapsed_s = time.monotonic() - hit_s
    return elapsed_s


@contextmanager
def _busy_server(rng: random.Random) -> Iterator[tuple[ServerProcess, list[Stream], list[psutil.Process]]]:
    """Starts a server, its streams and, at a random moment, what is done to it; afterwards nothing may be left."""
    with tempfile.TemporaryDirectory(prefix="kill-drill-") as folder:
        shm = set(os.listdir("/dev/shm"))
        with start_server(_EXECUTOR, folder=folder) as server:
            family = psutil.Process(server.process.pid).children(recursive=True)
            streams = [Stream(server) for _ in range(_NUM_STREAMS)]
            time.sleep(rng.random())
            yield server, streams, family
        assert set(os.listdir("/dev/shm")) == shm
        assert not list(Path(folder).iterdir()), list(Path(folder).iterdir())
