"""Runs engine cores in this process, from loading to the end: one here, or several replicas, each on its own thread.

Knows queues; whether another process is at their other end is the caller's business.
"""

import os
import queue
import threading
from collections.abc import Callable

import msgspec

from jaxllm.config import EngineConfig
from jaxllm.engine.core_link import OnMessage
from jaxllm.engine.core_loop import EngineCoreLoop, Inbox, WorkersFailed
from jaxllm.engine.core_messages import (
    EngineFailed,
    FromCore,
    Hello,
    LoadProgress,
    Ready,
    ShutDown,
    StartEngine,
    ToCore,
)
from jaxllm.engine.engine_core import EngineCore
from jaxllm.engine.pulse import LoopWatch, PulseThread
from jaxllm.exceptions import EngineDeadError, JaxllmError
from jaxllm.executor.executor import make_executor
from jaxllm.executor.heartbeat import cpu_ticks
from jaxllm.logger import get_logger
from jaxllm.messages import RefusedRequest
from jaxllm.progress import reporting_to

_logger = get_logger(__name__)


def run_core(config: EngineConfig, inbox: Inbox, send: Callable[[FromCore], None]) -> EngineFailed | None:
    """Loads a core, says Ready and serves until a ShutDown. Returns why it ended, if nobody asked for it."""
    try:
        with reporting_to(lambda phase, percent, eta_s: send(LoadProgress(phase, percent, eta_s))):
            executor = make_executor(config)
            core = EngineCore(config, executor)
        executor.register_failure_callback(lambda reason: inbox.put(WorkersFailed(reason)))
        send(Ready([core.kv_cache_info]))
        loop = EngineCoreLoop(core, inbox, send)
        with PulseThread(LoopWatch(loop, lambda: cpu_ticks(os.getpid())), send):
            loop.run()
        core.shutdown()  # where it has failed, the end of the process frees the device
    except JaxllmError as error:
        return EngineFailed(type(error).__name__, str(error))
    except Exception as error:
        _logger.exception("the engine has failed")
        return EngineFailed(EngineDeadError.__name__, f"the engine has failed: {type(error).__name__}: {error}")
    return None


class ReplicaThreads:
    """All data parallel replicas in this process, as one accelerator host wants it: its chips have a single owner.

    A CoreLink: give it messages for its replicas by their engine_index. Replicas share Python's interpreter lock, so
    their host work takes turns; their devices work at the same time.

    Args:
      config: Of the engine; each replica gets it with its rank.
      on_message: Takes what they say, on their threads, with their engine_index. EngineFailed is each one's last word.
    """

    def __init__(self, config: EngineConfig, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._inboxes: list[Inbox] = []
        self._threads: list[threading.Thread] = []
        for rank in range(config.parallel.data_parallel_size):
            inbox: Inbox = queue.SimpleQueue()
            arguments = (rank, config.of_replica(rank), inbox)
            self._inboxes.append(inbox)
            self._threads.append(threading.Thread(target=self._run, args=arguments, name=f"engine-{rank}", daemon=True))
        for thread in self._threads:
            thread.start()

    def send(self, message: ToCore | RefusedRequest) -> None:
        """Hands over a message. What is nobody's in particular goes to all, or, if it only has to be told, to one."""
        match message:
            case ShutDown():
                for inbox in self._inboxes:
                    inbox.put(message)
            case StartEngine():
                raise AssertionError("replicas start by themselves")
            case RefusedRequest():
                self._inboxes[0].put(message)
            case _:
                self._inboxes[message.engine_index].put(message)

    def shutdown(self) -> None:
        """Ends the replicas after the steps that run, and waits for them. Idempotent, for any thread."""
        self.send(ShutDown())
        for thread in self._threads:
            if thread is not threading.current_thread():  # the collector may call us there
                thread.join()

    def _run(self, rank: int, config: EngineConfig, inbox: Inbox) -> None:
        def send(message: FromCore) -> None:
            assert not isinstance(message, Hello)  # only processes say that
            self._on_message(msgspec.structs.replace(message, engine_index=rank))

        try:
            failure = run_core(config, inbox, send)
        except BaseException as error:  # SystemExit too: it would end this thread and nothing else
            _logger.exception("replica %d has ended", rank)
            failure = EngineFailed(EngineDeadError.__name__, f"replica {rank} has ended: {type(error).__name__}")
        send(failure or EngineFailed(EngineDeadError.__name__, "the engine was shut down"))
