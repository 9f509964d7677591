"""Compiles rows of the table for TPUs: one process of libtpu a chip, started anew when the compiler takes it down."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from pallas_kernels.aot.bundles import DUMP_FLAGS

# libtpu asks the cloud which TPU it runs on unless it is told; the type only has to be one that exists.
_NO_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


def compile_for_tpu(rows: Iterable[tuple[str, str]], target: str) -> Iterator[dict[str, Any]]:
    """Compiles rows one after the other.

    Args:
      rows: Pairs of a kernel's and a shape's name.
      target: The chip, one of TPU_TARGETS.

    Yields:
      For each row: compiled, reason, seconds and, if it compiled, figures.
    """
    with tempfile.TemporaryDirectory(prefix="aot-") as folder:
        worker: subprocess.Popen[str] | None = None
        errors = Path(folder, "errors.txt")
        try:
            for kernel, shape in rows:
                worker = worker or _start(target, Path(folder, "dumps"), errors)
                answer = _ask(worker, {"kernel": kernel, "shape": shape})
                if answer is None:
                    reason = f"the compiler ended with status {worker.wait()}: {_last_words(errors)}"
                    answer, worker = {"compiled": False, "reason": reason, "seconds": None}, None
                yield answer
        finally:
            if worker is not None:
                worker.kill()
                worker.wait()


def _start(target: str, dumps: Path, errors: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, **_NO_TPU, "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dumps} {DUMP_FLAGS}"}
    command = [sys.executable, "-m", "pallas_kernels.aot.tpu_worker", target, str(dumps)]
    with errors.open("w") as stderr:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        )


def _ask(worker: "subprocess.Popen[str]", request: Mapping[str, str]) -> dict[str, Any] | None:
    """Sends one request; None if the worker ended instead of answering."""
    stdin, stdout = _pipes(worker)
    try:
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
    except BrokenPipeError:
        return None
    line = stdout.readline()
    return json.loads(line) if line else None


def _pipes(worker: "subprocess.Popen[str]") -> tuple[IO[str], IO[str]]:
    assert worker.stdin is not None and worker.stdout is not None
    return worker.stdin, worker.stdout


def _last_words(errors: Path) -> str:
    lines = [line.strip() for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
