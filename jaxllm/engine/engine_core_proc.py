"""EngineCoreProc: the process that an EngineCore runs in. `python -m jaxllm.engine.engine_core_proc FOLDER FD`.

Started by core_process.py, which draws the handshake. Three threads: one reads messages into the input queue, the main
one runs the busy loop, one writes the output queue. A fourth waits for the front end's death. Where it holds several
data parallel replicas, each has a thread for its busy loop. Knows neither models nor devices.

Exit codes are those of exceptions.py.
"""

import ctypes
import faulthandler
import logging
import os
import queue
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec
import zmq

from jaxllm.config import EngineConfig
from jaxllm.engine import garbage
from jaxllm.engine.core_loop import Inbox, WorkersFailed
from jaxllm.engine.core_messages import EngineFailed, FromCore, Hello, Ready, ShutDown, StartEngine, ToCore
from jaxllm.engine.core_runner import ReplicaThreads, run_core
from jaxllm.engine.pulse import STACKS_SIGNAL
from jaxllm.engine.serialization import DecodeError, Frame, MessageDecoder, MessageEncoder
from jaxllm.exceptions import EXIT_ENGINE_DIED, EXIT_OK, exit_code, from_name
from jaxllm.logger import get_logger
from jaxllm.messages import RefusedRequest

_logger = get_logger(__name__)

_PR_SET_PDEATHSIG = 1
_LINGER_MS = 2000
_STANDARD_INPUT = 0


def main(argv: Sequence[str]) -> int:
    """Runs one core from the handshake to the end, and returns the process's exit code."""
    folder, sentinel = argv[0], int(argv[1])
    os.set_inheritable(sentinel, False)  # no child of ours may seem to be us
    # Whoever signals a whole group of processes means the front end, which may want to drain first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL)
    threading.Thread(target=_die_with_parent, args=(folder,), name="parent-watcher", daemon=True).start()
    inbox: Inbox = queue.SimpleQueue()
    outbox: queue.SimpleQueue[FromCore | None] = queue.SimpleQueue()
    _start_thread("input", lambda: _read_messages(f"ipc://{folder}/input", inbox))
    writer = _start_thread("output", lambda: _write_messages(f"ipc://{folder}/output", outbox))

    def send(message: FromCore) -> None:
        if isinstance(message, Ready):
            garbage.settle()
        outbox.put(message)

    send(Hello(os.getpid()))
    code = _run(inbox, send)
    outbox.put(None)
    writer.join()
    if code != EXIT_OK:
        logging.shutdown()
        os._exit(code)  # other replicas may be in the middle of a step, which nothing but this would end
    return code


def _run(inbox: Inbox, send: Callable[[FromCore], None]) -> int:
    """Loads, serves, and says why it ended if nobody asked for it."""
    start = inbox.get()
    if not isinstance(start, StartEngine):
        return EXIT_OK  # shut down before it began
    _die_by_signal_with_parent()
    parallel = start.config.parallel
    if parallel.data_parallel_size > 1 and parallel.data_parallel_rank is None:
        failure = _run_replicas(start.config, inbox, send)
    else:
        failure = run_core(start.config, inbox, send)
    if failure is None:
        return EXIT_OK
    send(failure)
    return exit_code(from_name(failure.error, failure.message))


def _run_replicas(config: EngineConfig, inbox: Inbox, send: Callable[[FromCore], None]) -> EngineFailed | None:
    """Passes messages on to the replicas until a ShutDown, or until one of them ends by itself."""
    ended: queue.SimpleQueue[EngineFailed] = queue.SimpleQueue()

    def on_message(message: FromCore) -> None:
        if isinstance(message, EngineFailed):
            ended.put(message)
            inbox.put(ShutDown())
        else:
            send(message)

    replicas = ReplicaThreads(config, on_message)
    while not isinstance(message := inbox.get(), ShutDown):
        assert not isinstance(message, WorkersFailed)  # that goes to the replica whose workers they are
        replicas.send(message)
    if not ended.empty():
        return ended.get()
    replicas.shutdown()
    return None


def _start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """Starts a thread without which we can't go on: if it fails, so does the process."""

    def run() -> None:
        try:
            target()
        except BaseException:
            _logger.exception("the engine's %s thread has failed", name)
            os._exit(EXIT_ENGINE_DIED)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _read_messages(address: str, inbox: Inbox) -> None:
    """Decodes what comes in, until a ShutDown."""
    decoder: MessageDecoder[ToCore] = MessageDecoder(ToCore)
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.set_hwm(0)
        socket.connect(address)
        while True:
            frames = socket.recv_multipart()
            message = _decode(decoder, frames)
            if message is not None:
                inbox.put(message)
            if isinstance(message, ShutDown):
                return


def _decode(decoder: "MessageDecoder[ToCore]", frames: Sequence[Frame]) -> ToCore | RefusedRequest | None:
    """Returns a message; of an unreadable request, its refusal; of anything else unreadable, nothing."""
    try:
        return decoder.decode(frames)
    except DecodeError as error:
        _logger.error("a message to the engine can't be read and is dropped: %s", error)
    try:
        return RefusedRequest(_ADD_HEAD.decode(frames[0]).request.request_id, "the engine can't read this request")
    except msgspec.DecodeError:
        return None


class _RequestHead(msgspec.Struct, array_like=True):
    request_id: str


class _AddHead(msgspec.Struct, array_like=True, tag="add"):
    """As much of an AddRequest as it takes to say whose it is."""

    request: _RequestHead


_ADD_HEAD = msgspec.msgpack.Decoder(_AddHead)


def _write_messages(address: str, outbox: "queue.SimpleQueue[FromCore | None]") -> None:
    """Encodes and sends what comes out, until None; then waits until it has been sent."""
    encoder = MessageEncoder()
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.connect(address)
        while (message := outbox.get()) is not None:
            socket.send_multipart(encoder.encode(message), copy=False)


def _die_with_parent(folder: str) -> None:
    """Ends the process when the front end's end of our standard input closes, whatever else goes on."""
    while os.read(_STANDARD_INPUT, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)  # there only if the front end died before it had heard of us
    os._exit(EXIT_ENGINE_DIED)


def _die_by_signal_with_parent() -> None:
    """Asks Linux to kill us with the front end, even where a native call holds up every Python thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
