"""Who stands still: neither the count nor the processor time has moved, look after look."""

import os
import signal
import struct
import subprocess
import sys

import pytest

from jaxllm.executor.heartbeat import HeartbeatWatch, cpu_ticks, is_stopped, num_heartbeat_bytes
from jaxllm.executor.shm_broadcast import make_memory


@pytest.fixture
def page() -> int:
    return make_memory(4096)


def _beat(page: int, rank: int, count: int) -> None:
    os.pwrite(page, struct.pack("<Q", count), 8 * rank)


def test_a_worker_is_still_after_six_looks_without_any_sign(page: int) -> None:
    watch = HeartbeatWatch(page, [1, 2], ticks=lambda pid: 0)
    assert watch.look() is None  # the first one only takes note
    for turn in range(6):
        _beat(page, 0, turn + 1)
        assert watch.look() == (1 if turn == 5 else None)


def test_one_beat_in_between_is_enough(page: int) -> None:
    watch = HeartbeatWatch(page, [1], ticks=lambda pid: 0)
    for turn in range(30):
        if turn % 5 == 0:
            _beat(page, 0, turn + 1)
        assert watch.look() is None


def test_processor_time_is_life_too(page: int) -> None:
    ticks = iter(range(100))
    watch = HeartbeatWatch(page, [1], ticks=lambda pid: next(ticks))
    assert all(watch.look() is None for _ in range(30))


def test_our_own_processor_time_grows_and_nobodys_is_zero() -> None:
    before = cpu_ticks(os.getpid())
    while cpu_ticks(os.getpid()) == before:
        pass
    assert cpu_ticks(2**22 + 1) == 0
    assert num_heartbeat_bytes(3) == 24


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_a_stopped_process_is_told_from_one_that_sleeps_and_one_that_has_gone() -> None:
    with subprocess.Popen(["sleep", "3600"]) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert is_stopped(process.pid)
        process.send_signal(signal.SIGCONT)
        os.waitpid(process.pid, os.WCONTINUED)
        assert not is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid)
