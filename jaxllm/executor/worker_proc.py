"""WorkerProc: the process that one worker of a MultiprocExecutor runs in. `python -m jaxllm.executor.worker_proc RANK`.

Started by worker_group.py. The main thread runs worker_busy_loop; one thread counts heartbeats, one waits for the
parent's death. Knows neither models nor devices.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec

from jaxllm.engine.serialization import MessageDecoder, MessageEncoder
from jaxllm.exceptions import EXIT_ENGINE_DIED, EXIT_OK
from jaxllm.executor.heartbeat import start_heartbeat
from jaxllm.executor.rpc_messages import FromWorker, RpcCall, RpcHello, RpcProgress, RpcReply
from jaxllm.executor.shm_broadcast import Frame, Patience, RingReader, RingShape, RingWriter
from jaxllm.executor.worker_wrapper import Failure, WorkerWrapper
from jaxllm.progress import reporting_to

_PR_SET_PDEATHSIG = 1
_STANDARD_INPUT = 0
_REPLY_TIMEOUT_S = 60.0  # the parent reads replies as they come
SHUTDOWN = "shutdown"


class WorkerHandles(msgspec.Struct, frozen=True):
    """What a worker's process inherits: descriptors, and the measures of what is behind them."""

    rank: int
    num_workers: int
    broadcast: RingShape
    response: RingShape
    broadcast_memory: int
    response_memory: int
    heartbeat_memory: int
    broadcast_bell: int  # the end that reads
    response_bell: int  # the end that writes
    channel: int  # a socket, both ways

    def fds(self) -> list[int]:
        return [
            self.broadcast_memory,
            self.response_memory,
            self.heartbeat_memory,
            self.broadcast_bell,
            self.response_bell,
            self.channel,
        ]


def main(argv: Sequence[str]) -> int:
    """Runs one worker until it is told to shut down."""
    handles = msgspec.json.decode(argv[0], type=WorkerHandles)
    for fd in handles.fds():
        os.set_inheritable(fd, False)  # no child of ours may seem to be us
    # Whoever signals a whole group of processes means the front end, which may want to drain first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, name="parent-watcher", daemon=True).start()
    if sys.platform == "linux":  # even where a native call holds up every Python thread
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    start_heartbeat(handles.heartbeat_memory, handles.rank, handles.num_workers)
    channel = socket.socket(fileno=handles.channel)
    reader = RingReader(handles.broadcast_memory, handles.broadcast, handles.rank, handles.broadcast_bell, channel)
    writer = RingWriter(handles.response_memory, handles.response, [handles.response_bell], [channel])
    wrapper = WorkerWrapper(handles.rank, handles.rank, handles.num_workers)
    worker_busy_loop(wrapper, reader, lambda frames: writer.write(frames, Patience(_REPLY_TIMEOUT_S)))
    return EXIT_OK


def worker_busy_loop(wrapper: WorkerWrapper, reader: RingReader, send: Callable[[Sequence[Frame]], None]) -> None:
    """Runs calls, in order, until SHUTDOWN has been one of them. The failure of a call is answered like a value."""
    encoder = MessageEncoder()
    decoder: MessageDecoder[RpcCall] = MessageDecoder(RpcCall)

    def reply(head: FromWorker, body: Sequence[Frame] = ()) -> None:
        send([*encoder.encode(head), *body])

    reply(RpcHello())
    while True:
        frames = reader.read(Patience())
        call = decoder.decode(frames[:1])
        is_mine = call.output_rank in (None, wrapper.rank)
        if is_mine:
            with reporting_to(lambda phase, percent, eta_s: reply(RpcProgress(phase, percent, eta_s))):
                result = wrapper.execute_method(call.method, frames[1:])
        else:
            result = wrapper.execute_method(call.method, frames[1:])
        if isinstance(result, Failure):
            reply(RpcReply(call.call_id, result.error, result.message))
        elif is_mine:
            reply(RpcReply(call.call_id), result)
        if call.method == SHUTDOWN:
            return


def _die_with_parent() -> None:
    """Ends the process when the parent's end of our standard input closes, whatever else goes on."""
    while os.read(_STANDARD_INPUT, 1):
        pass
    os._exit(EXIT_ENGINE_DIED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
