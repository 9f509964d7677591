"""WorkerGroup: a MultiprocExecutor's worker processes. Spawns them, watches them, and ends all when one has gone.

    parent                                          a worker: worker_proc.py
      rpc_broadcast_mq, one for all   ── calls ──>  worker_busy_loop
      worker_response_mq, one each    <─ replies ─
      standard input, a pipe                        when the parent dies, the kernel closes it
      standard error, a pipe                        its lines go to our log; at its end the worker has died
      heartbeats, a page for all      <─ counts ──

One thread does all this, from the first spawn to the last burial: the parent-death signal comes when the *thread* that
spawned ends. A death or a standstill raises the alarm, which wakes everybody who waits for a worker.
"""

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from jaxllm.engine.serialization import MessageEncoder
from jaxllm.executor.heartbeat import LOOK_S, HeartbeatWatch, make_heartbeat_memory
from jaxllm.executor.rpc_messages import RpcCall
from jaxllm.executor.shm_broadcast import AlarmError, Patience, RingReader, RingShape, RingWriter, make_memory
from jaxllm.executor.worker_proc import SHUTDOWN, WorkerHandles
from jaxllm.logger import get_logger

_logger = get_logger(__name__)

_MODULE = "jaxllm.executor.worker_proc"
_SHUTDOWN_TIMEOUT_S = 3.0
_FORCED_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=\S+")
_READ_BYTES = 1 << 16


@dataclass(slots=True, eq=False)
class _Worker:
    """One process, and our ends of what joins us to it."""

    rank: int
    process: "subprocess.Popen[bytes]"
    errors: int  # the reading end of its standard error
    unfinished_line: bytes = b""
    last_line: str = ""


class WorkerGroup:
    """Worker processes, from the constructor to shutdown(). The rings may be used by one thread at a time.

    Args:
      num_workers: How many.
      num_chunks, chunk_bytes: Of each ring.
      on_failure: Told once, on a thread of ours, why the workers can't go on. Not called after shutdown().

    Attributes:
      broadcast: Writes calls to all.
      responses: Read each worker's replies.
      alarm: Readable once the workers have failed.
      failure: Why; None while they live.
    """

    def __init__(self, num_workers: int, num_chunks: int, chunk_bytes: int, on_failure: Callable[[str], None]) -> None:
        self.failure: str | None = None
        self._num_workers = num_workers
        self._on_failure = on_failure
        self._owner_pid = os.getpid()
        self._is_shutting_down = False
        self._workers: list[_Worker] = []
        self._broadcast_shape = RingShape(num_workers, num_chunks, chunk_bytes)
        self._response_shape = RingShape(1, num_chunks, chunk_bytes)
        self._broadcast_memory = make_memory(self._broadcast_shape.num_bytes)
        self._heartbeat_memory = make_heartbeat_memory(num_workers, make_memory)
        self.alarm, self._alarm_switch = os.pipe()
        self._our_fds = [self._broadcast_memory, self._heartbeat_memory, self.alarm, self._alarm_switch]
        self._bells: list[int] = []
        self._channels: list[socket.socket] = []
        self.responses: list[RingReader] = []
        self._start_error: Exception | None = None
        self._has_started = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="worker-watcher", daemon=True)
        self._watcher.start()
        self._has_started.wait()
        if self._start_error is not None:
            raise self._start_error
        self.broadcast = RingWriter(self._broadcast_memory, self._broadcast_shape, self._bells, self._channels)

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def wait_failure(self, timeout_s: float) -> str | None:
        """Waits until the workers have failed and returns why; None if they haven't by then."""
        with contextlib.suppress(AlarmError):
            Patience(alarm=self.alarm).wait([], at_most_s=timeout_s)
        return self.failure

    def shutdown(self) -> None:
        """Asks the workers to stop, kills those that don't, and waits until all have gone. Idempotent."""
        if os.getpid() != self._owner_pid:
            return  # a fork of the process that owns them ends
        if not self._is_shutting_down and self._watcher.is_alive():
            self._is_shutting_down = True
            with contextlib.suppress(AlarmError, TimeoutError, ConnectionError):
                encoder = MessageEncoder()
                frames = [*encoder.encode(RpcCall(-1, SHUTDOWN)), *encoder.encode(())]
                self.broadcast.write(frames, Patience(0.5, self.alarm))
        if threading.current_thread() is self._watcher:
            return  # the collector calls us there; they go all the same
        self._watcher.join(_SHUTDOWN_TIMEOUT_S)
        if self._watcher.is_alive():
            self._kill()
            self._watcher.join()
        while self._our_fds:  # not before: somebody might wait for one
            os.close(self._our_fds.pop())
        for channel in self._channels:
            channel.close()

    def _watch(self) -> None:
        try:
            for rank in range(self._num_workers):
                self._spawn(rank)
        except Exception as error:
            self._start_error = error
            self._bury()
            return
        finally:
            self._has_started.set()
        reason = self._listen()
        self._bury()
        if reason is not None:
            self.failure = reason
            os.write(self._alarm_switch, b"\0")
            self._on_failure(reason)

    def _spawn(self, rank: int) -> None:
        """Starts one worker, and closes our copies of its ends."""
        response_memory = make_memory(self._response_shape.num_bytes)
        broadcast_bell, our_broadcast_bell = os.pipe()
        our_response_bell, response_bell = os.pipe()
        channel, our_channel = socket.socketpair()
        errors, childs_errors = os.pipe()
        handles = WorkerHandles(
            rank,
            self._num_workers,
            self._broadcast_shape,
            self._response_shape,
            self._broadcast_memory,
            response_memory,
            self._heartbeat_memory,
            broadcast_bell,
            response_bell,
            channel.fileno(),
        )
        self._our_fds += [response_memory, our_broadcast_bell, our_response_bell, errors]
        self._bells.append(our_broadcast_bell)
        self._channels.append(our_channel)
        self.responses.append(RingReader(response_memory, self._response_shape, 0, our_response_bell, our_channel))
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, msgspec.json.encode(handles).decode()],
                stdin=subprocess.PIPE,
                stdout=childs_errors,  # our standard output holds generated text alone
                stderr=childs_errors,
                pass_fds=handles.fds(),
                env=_environment(),
                process_group=0,  # Ctrl-C is for us; what becomes of the workers is ours to say
            )
        finally:
            channel.close()
            for fd in (broadcast_bell, response_bell, childs_errors):
                os.close(fd)
        self._workers.append(_Worker(rank, process, errors))

    def _listen(self) -> str | None:
        """Passes on what the workers print until one has gone. Returns why; None when all have gone as told."""
        watch = HeartbeatWatch(self._heartbeat_memory, self.pids)
        living = {worker.errors: worker for worker in self._workers}
        poll = select.poll()
        for fd in living:
            poll.register(fd, select.POLLIN)
        next_look_s = time.monotonic()
        while living:
            for fd, _ in poll.poll(1000 * LOOK_S):
                if not self._pass_on(living[fd]):
                    poll.unregister(fd)
                    worker = living.pop(fd)
                    if not self._is_shutting_down:
                        return _death(worker)
            if time.monotonic() < next_look_s:
                continue
            next_look_s = time.monotonic() + LOOK_S
            still = watch.look()
            if still is not None and not self._is_shutting_down:
                return f"worker {still} (process {self.pids[still]}) stands still: no heartbeat for 3 s"
        return None

    def _pass_on(self, worker: _Worker) -> bool:
        """Prints what a worker has printed, line by line, with its rank. Returns False once nothing more can come."""
        data = os.read(worker.errors, _READ_BYTES)
        *lines, worker.unfinished_line = (worker.unfinished_line + data).split(b"\n")
        if not data and worker.unfinished_line:
            lines.append(worker.unfinished_line)
        for line in lines:
            text = line.decode(errors="replace")
            worker.last_line = text.strip() or worker.last_line
            sys.stderr.write(f"[worker {worker.rank}] {text}\n")
        return bool(data)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()  # does nothing to those that have been waited for

    def _bury(self) -> None:
        self._kill()
        for worker in self._workers:
            worker.process.wait()
            assert worker.process.stdin is not None
            worker.process.stdin.close()


def _environment() -> dict[str, str]:
    """Returns a worker's environment: ours, with our modules; how many CPU devices it has is said when it starts."""
    path = os.pathsep.join(str(entry) or os.getcwd() for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": path}
    flags = _FORCED_DEVICE_COUNT.sub("", environment.get("XLA_FLAGS", "")).strip()
    environment.pop("XLA_FLAGS", None)
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    return {**environment, "XLA_FLAGS": flags} if flags else environment


def _death(worker: _Worker) -> str:
    """Returns one line about a worker whose standard error has ended."""
    code = worker.process.wait()
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    words = f": {worker.last_line:.300}" if worker.last_line and code >= 0 else ""
    return f"worker {worker.rank} (process {worker.process.pid}) {how}{words}"
