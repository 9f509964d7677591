"""One contract for all four executors, each with real processes where it has any."""

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fakes.executor_contract import CHECKS

ROOT = Path(__file__).parents[2]
_PATIENCE_S = 600


def _start(backend: str, environment: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.executor_contract", backend],
        cwd=ROOT,
        env={"RAY_ADDRESS": "local", **os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _check(process: "subprocess.Popen[str]", num_skipped: int = 0) -> None:
    output, _ = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 0, output
    assert sum(line.startswith("ok ") for line in output.splitlines()) == len(CHECKS) - num_skipped, output


def test_uni() -> None:
    _check(_start("uni"), num_skipped=1)


def test_mp() -> None:
    _check(_start("mp"))


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray isn't installed")
def test_ray() -> None:
    _check(_start("ray"))


def test_external_launcher() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [_start("external_launcher", {**common, "RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")]
    for process in ranks:
        _check(process, num_skipped=1)
