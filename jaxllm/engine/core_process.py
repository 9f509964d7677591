"""CoreProcess: the front end's link to an EngineCore in a child process. Spawns, shakes hands, listens, buries.

    front end                                      child: engine_core_proc.py
      bind input, output; spawn  ───────────────>  connect
                                 <─ Hello ───────
      remove the socket files;   ── StartEngine ─>  load
                                 <─ LoadProgress ─
                                 <─ Ready ───────
                                 ── AddRequest ... ShutDown ─>
                                 <─ EngineCoreOutputs, a Pulse every second ... EngineFailed ─

Both sockets are ipc:// in a fresh directory that only this user can enter. Once both ends are connected nobody needs
the files any more, so they are removed at once: whatever is killed later leaves none.

Death shows in both directions. The child holds the writing end of a pipe that we read (the sentinel), and reads its
standard input, whose writing end we hold: when a process dies, the kernel closes its ends. A child that lives, but is
frozen, sends no pulse: then we say so in its place, and ask it for its stacks, unless somebody has stopped it.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import zmq

from jaxllm.config import EngineConfig
from jaxllm.engine.core_messages import EngineFailed, FromCore, Hello, Pulse, Ready, ShutDown, StartEngine, ToCore
from jaxllm.engine.pulse import LOOK_S, STACKS_SIGNAL, STALLED_S, SilenceWatch
from jaxllm.engine.serialization import DecodeError, MessageDecoder, MessageEncoder
from jaxllm.exceptions import EngineDeadError
from jaxllm.executor.heartbeat import cpu_ticks, is_stopped
from jaxllm.logger import get_logger

_logger = get_logger(__name__)

_SHUTDOWN_TIMEOUT_S = 5.0
_CONNECT_POLL_S = 0.005
_LAST_WORDS_MS = 200  # how long a dead child's messages may still be on their way through the kernel
_STANDARD_ERROR = 2
_MODULE = "jaxllm.engine.engine_core_proc"


class CoreProcess:
    """A core in a child process. Returns from the constructor at once; Ready comes as a message.

    Args:
      config: What the core is made from.
      on_message: Takes the core's messages in order, on a thread of ours. EngineFailed always comes, and last.
    """

    def __init__(self, config: EngineConfig, on_message: Callable[[FromCore], None]) -> None:
        self._config = config
        self._on_message = on_message
        self._encoder = MessageEncoder()
        self._send_lock = threading.Lock()
        self._owner_pid = os.getpid()
        self._folder = Path(tempfile.mkdtemp(prefix="jaxllm-"))  # mode 0700
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.PUSH)
        self._input.set_hwm(0)  # never waits: the core takes messages off between steps only
        self._is_shutting_down = False
        self._is_ready = False
        self._process: subprocess.Popen[bytes] | None = None
        self._silence = SilenceWatch(lambda: cpu_ticks(self.pid))
        self._start_error: Exception | None = None
        self._has_started = threading.Event()
        # The parent-death signal comes when the *thread* that spawned ends: so that one watches to the end.
        self._watcher = threading.Thread(target=self._watch, name="engine-watcher", daemon=True)
        self._watcher.start()
        try:
            self._has_started.wait()
        except BaseException:  # Ctrl-C
            self._has_started.wait()
            self.shutdown()
            raise
        error = self._start_error
        if error is not None:
            raise EngineDeadError(
                f"the engine process, with sockets in {self._folder}, can't be started: {error}; "
                "TMPDIR names another place"
            ) from error

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send(self, message: ToCore) -> None:
        """Sends without waiting. Does nothing once the core has gone.

        Raises:
          TypeError, ValueError, OverflowError: The message can't be encoded.
        """
        with self._send_lock:
            frames = self._encoder.encode(message)
            if not self._input.closed:
                with contextlib.suppress(zmq.Again):  # nobody at the other end: it has just gone
                    self._input.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def shutdown(self) -> None:
        """Asks the core to stop, kills it if it doesn't, and waits until it has gone. Idempotent, for any thread."""
        if os.getpid() != self._owner_pid:
            return  # a fork of the process that owns it ends
        self._is_shutting_down = True
        self.send(ShutDown())
        if threading.current_thread() is self._watcher:
            return  # the collector calls us there; the core goes all the same
        self._watcher.join(_SHUTDOWN_TIMEOUT_S if self._is_ready else 0)  # it doesn't listen while it loads
        if self._watcher.is_alive():
            assert self._process is not None
            self._process.kill()
            self._watcher.join()

    def _watch(self) -> None:
        """Spawns the child, passes on what it says until it has gone, and clears up."""
        output = self._context.socket(zmq.PULL)
        output.set_hwm(0)
        try:
            self._input.bind(f"ipc://{self._folder}/input")
            output.bind(f"ipc://{self._folder}/output")
            sentinel, self._process = _spawn(self._folder)
        except Exception as error:
            self._start_error = error
            self._close(output)
            return
        finally:
            self._has_started.set()
        failure = self._listen(output, sentinel)
        os.close(sentinel)
        exit_code = self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._close(output)
        self._on_message(failure or _failure_of(exit_code, self._is_shutting_down))

    def _listen(self, output: "zmq.Socket[bytes]", sentinel: int) -> EngineFailed | None:
        """Passes messages on until the child has gone. Returns its last word, if it had one."""
        decoder: MessageDecoder[FromCore] = MessageDecoder(FromCore)
        poller = zmq.Poller()
        poller.register(output, zmq.POLLIN)
        poller.register(sentinel, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(int(LOOK_S * 1000) if self._is_ready else None))
            if not ready:
                self._tell_silence()
                continue
            if output not in ready and not output.poll(_LAST_WORDS_MS):
                return None
            try:
                message = decoder.decode(output.recv_multipart())
            except DecodeError as error:
                _logger.error("a message from the engine can't be read and is dropped: %s", error)
                continue
            if isinstance(message, EngineFailed):
                return message
            if isinstance(message, Hello):
                if not self._has_connected(sentinel):
                    return None
                shutil.rmtree(self._folder, ignore_errors=True)
                self.send(StartEngine(self._config))
                continue
            self._is_ready = self._is_ready or isinstance(message, Ready)
            self._silence.heard()
            self._on_message(message)

    def _tell_silence(self) -> None:
        """Says for how long the child has been silent, which doesn't say anything itself."""
        silent_s = self._silence.look()
        self._on_message(Pulse(silent_s))
        if silent_s == STALLED_S:
            stopped = is_stopped(self.pid)
            why = "; it was stopped: kill -CONT lets it go on" if stopped else ""
            _logger.error("the engine process (%d) stands still: no sign of life for %g s%s", self.pid, silent_s, why)
            if not stopped:  # it would print once it goes on, while its threads run, and may crash in that
                assert self._process is not None
                self._process.send_signal(STACKS_SIGNAL)

    def _has_connected(self, sentinel: int) -> bool:
        """Waits until the child has connected to our input socket too: without its file it no longer could.

        Returns False if the child has gone instead.
        """
        while True:
            with self._send_lock:
                if self._input.poll(0, zmq.POLLOUT):
                    return True
            if select.select([sentinel], [], [], _CONNECT_POLL_S)[0]:
                return False

    def _close(self, output: "zmq.Socket[bytes]") -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        output.close(linger=0)
        with self._send_lock:
            self._input.close(linger=0)
        self._context.term()


def _spawn(folder: Path) -> tuple[int, "subprocess.Popen[bytes]"]:
    """Returns the sentinel, readable once the child has gone, and the child."""
    sentinel, childs_end = os.pipe()
    # The same modules as here, whatever has been done to sys.path; -P, as the current folder is not one of them.
    path = os.pathsep.join(str(entry) or os.getcwd() for entry in sys.path)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, str(folder), str(childs_end)],
            stdin=subprocess.PIPE,
            stdout=_STANDARD_ERROR,  # our standard output holds generated text alone
            pass_fds=(childs_end,),
            env={**os.environ, "PYTHONPATH": path},
            process_group=0,  # Ctrl-C is for us; what becomes of the child is ours to say
        )
    except BaseException:
        os.close(sentinel)
        raise
    finally:
        os.close(childs_end)
    return sentinel, process


def _failure_of(exit_code: int, was_asked: bool) -> EngineFailed:
    """Returns the last word of a child that has left none."""
    if was_asked:
        return EngineFailed(EngineDeadError.__name__, "the engine was shut down")
    if exit_code < 0:
        how = f"was ended by {signal.Signals(-exit_code).name}"
    else:
        how = f"ended with exit code {exit_code}"
    return EngineFailed(EngineDeadError.__name__, f"the engine process {how}")
