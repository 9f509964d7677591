"""Heartbeats: each worker counts up in shared memory, so that a frozen process is told from one that computes for long.

A thread does the counting; a native call that holds up every Python thread stops it too. What the process takes of the
processor counts as life as well, therefore. Knows no message.
"""

import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

BEAT_S = 0.2
LOOK_S = 0.5
# Looks without a sign of life, each with the watcher awake in between: if the whole machine stands still, nobody dies.
_MAX_SILENT_LOOKS = 6
_BEAT = struct.Struct("<Q")


def num_heartbeat_bytes(num_workers: int) -> int:
    return _BEAT.size * num_workers


def start_heartbeat(memory: int, rank: int, num_workers: int) -> None:
    """Starts the thread that counts for this process, as long as it lives."""
    page = mmap.mmap(memory, num_heartbeat_bytes(num_workers))

    def beat() -> None:
        count = 0
        while True:
            count += 1
            _BEAT.pack_into(page, rank * _BEAT.size, count)
            time.sleep(BEAT_S)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def cpu_ticks(pid: int) -> int:
    """Returns the processor time of a process so far, in the kernel's ticks; 0 where nobody tells."""
    stat = _stat(pid)
    return int(stat[11]) + int(stat[12]) if stat else 0


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped, by SIGSTOP or a debugger; False where nobody tells."""
    return _stat(pid)[:1] in (["T"], ["t"])


def _stat(pid: int) -> list[str]:
    """Returns what the kernel says of a process, from its state on; nothing where it doesn't."""
    if sys.platform != "linux":
        return []
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has gone, which others see
        return []
    return stat.rpartition(")")[2].split()  # the name may hold spaces


class HeartbeatWatch:
    """Tells which workers stand still. Call `look` every LOOK_S seconds.

    Args:
      memory: The page that start_heartbeat writes to.
      pids: The workers' processes, by rank.
      ticks: Returns a process's processor time.
    """

    def __init__(self, memory: int, pids: Sequence[int], ticks: Callable[[int], int] = cpu_ticks) -> None:
        self._page = mmap.mmap(memory, num_heartbeat_bytes(len(pids)))
        self._pids = pids
        self._ticks = ticks
        self._last = [(-1, -1)] * len(pids)
        self._num_silent = [0] * len(pids)

    def look(self) -> int | None:
        """Returns the rank of a worker that has given no sign of life for several looks, or None."""
        for rank, pid in enumerate(self._pids):
            (count,) = _BEAT.unpack_from(self._page, rank * _BEAT.size)
            now = (count, self._ticks(pid))
            self._num_silent[rank] = self._num_silent[rank] + 1 if now == self._last[rank] else 0
            self._last[rank] = now
            if self._num_silent[rank] >= _MAX_SILENT_LOOKS:
                return rank
        return None


def make_heartbeat_memory(num_workers: int, make_memory: Callable[[int], int]) -> int:
    """Returns the descriptor of a page where nobody has beaten yet."""
    return make_memory(max(num_heartbeat_bytes(num_workers), os.sysconf("SC_PAGESIZE")))
