"""Runs the processes that compile: one a target, several at a time, started anew when a compiler takes one down.

Knows requests and answers only, see worker.py; nothing of JAX is imported on this side.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from pallas_kernels.aot.bundles import DUMP_FLAGS

# libtpu asks the cloud which TPU it runs on unless it is told; the type only has to be one that exists.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # otherwise one process at a time, for the sake of the chips
}


class RowKey(NamedTuple):
    """Names one row of the table."""

    kernel: str
    shape: str
    target: str
    sizes: tuple[int, ...] = ()  # to try in place of the tuned ones: TileSizes, field by field


def compile_rows(keys: Sequence[RowKey], num_processes: int) -> Iterator[tuple[RowKey, dict[str, Any]]]:
    """Compiles rows, each target's in order.

    Yields:
      Each row as soon as it is there, with worker.py's answer: compiled, reason, figures.
    """
    targets = list(dict.fromkeys(key.target for key in keys))
    finished: SimpleQueue[tuple[RowKey, dict[str, Any]] | BaseException] = SimpleQueue()

    def run(target: str) -> None:
        try:
            for pair in _compile_target([key for key in keys if key.target == target], target):
                finished.put(pair)
        except BaseException as error:
            finished.put(error)
            raise

    with ThreadPoolExecutor(num_processes) as pool:
        for target in targets:
            pool.submit(run, target)
        for _ in keys:
            item = finished.get()
            if isinstance(item, BaseException):
                pool.shutdown(cancel_futures=True)
                raise item
            yield item


def _compile_target(keys: Sequence[RowKey], target: str) -> Iterator[tuple[RowKey, dict[str, Any]]]:
    with tempfile.TemporaryDirectory(prefix="aot-") as folder:
        errors = Path(folder, "errors.txt")
        worker: subprocess.Popen[str] | None = None
        try:
            for key in keys:
                worker = worker or _start(target, Path(folder, "dumps"), errors)
                answer = _ask(worker, key)
                if answer is None:
                    reason = f"the compiler ended with status {worker.wait()}: {_last_words(errors)}"
                    answer = {"compiled": False, "reason": reason, "figures": {}}
                    _stop(worker)
                    worker = None
                yield key, answer
        finally:
            if worker is not None:
                _stop(worker)


def _start(target: str, dumps: Path, errors: Path) -> "subprocess.Popen[str]":
    """Starts a worker. Compilers are noisy when there is no accelerator, so what they print is only kept."""
    environment = {**os.environ, **_ENVIRONMENT, "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dumps} {DUMP_FLAGS}"}
    with errors.open("w") as stderr:
        return subprocess.Popen(
            _command(target, dumps),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )


def _command(target: str, dumps: Path) -> list[str]:
    return [sys.executable, "-m", "pallas_kernels.aot.worker", target, str(dumps)]


def _stop(worker: "subprocess.Popen[str]") -> None:
    """Ends a worker, dead or alive, and closes its pipes; a dead one may have left a request unread."""
    worker.kill()
    with suppress(BrokenPipeError), worker:
        pass


def _ask(worker: "subprocess.Popen[str]", key: RowKey) -> dict[str, Any] | None:
    """Asks for one row; None if the worker ended instead of answering."""
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(key._asdict()) + "\n")
        worker.stdin.flush()
    except BrokenPipeError:
        return None
    line = worker.stdout.readline()
    return json.loads(line) if line else None


def _last_words(errors: Path) -> str:
    lines = [line.strip() for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
