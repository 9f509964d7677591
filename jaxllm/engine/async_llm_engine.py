"""AsyncLLMEngine: `async for output in engine.generate(...)`. The engine of the servers, on one asyncio event loop.

It joins EngineStart, InputProcessor and RequestRouter, and does none of their work. How many requests may wait is the
servers' business.
"""

import asyncio
import concurrent.futures
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from jaxllm.config import EngineConfig
from jaxllm.engine.core_link import Connect
from jaxllm.engine.data_parallel_link import connect_core
from jaxllm.engine.engine_start import EngineStart, StartedEngine
from jaxllm.engine.front_end import FrontEnd, load_front_end
from jaxllm.engine.input_processor import InputProcessor, Prompt
from jaxllm.engine.pulse import HOPELESS_S, STALLED_S
from jaxllm.engine.request_router import RequestRouter
from jaxllm.engine.stats import StatsCollector, total_stats
from jaxllm.engine_args import EngineArgs
from jaxllm.exceptions import EngineDeadError, JaxllmError
from jaxllm.messages import KVCacheInfo, SchedulerStats
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")

_INLINE_SIZE = 4096  # characters or tokens; handing less than this to a thread costs more than doing it
_NUM_THREADS = 2


class EngineStatus(NamedTuple):
    phase: Literal["loading", "ready", "stalled", "draining", "dead"]
    percent: float | None  # of what `detail` names; only while loading
    eta_s: float | None
    detail: str
    is_hopeless: bool = False  # it lives, but has stood still for so long that only a restart would help


class AsyncLLMEngine:
    """Answers any number of requests at once. Make it, then use it from one event loop.

    Loading begins at once, in the background; `status` tells how far it is.

    Args:
      load: Returns the front end's parts. Runs on a thread.
      connect: Starts the core.

    Attributes:
      stats_collector: Follows each request. Whoever wants the numbers puts his own here before the first request.
    """

    def __init__(self, load: Callable[[], FrontEnd], connect: Connect = connect_core) -> None:
        self.stats_collector = StatsCollector([])
        self._start = EngineStart(load, connect)
        self._is_draining = False
        self._input_processor: InputProcessor | None = None
        self._router: RequestRouter | None = None
        self._threads = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "tokenizer")

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "AsyncLLMEngine":
        """Returns at once an engine that loads in the background. What is wrong with `args`, wait_ready tells."""
        return cls(lambda: load_front_end(args))

    @property
    def config(self) -> EngineConfig:
        """What the engine was made from. It must be ready."""
        assert self._start.front_end is not None, "wait_ready first"
        return self._start.front_end.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. The engine must be ready."""
        assert self._start.front_end is not None, "wait_ready first"
        return self._start.front_end.tokenizer

    @property
    def kv_cache_infos(self) -> list[KVCacheInfo] | None:
        """What each engine core allocated, None while they load."""
        result = self._start.result
        return result.result().kv_cache_infos if result.done() and result.exception() is None else None

    @property
    def stats(self) -> SchedulerStats | None:
        """The scheduler's counters of the latest step, None before the first. Of all replicas together."""
        return None if self._router is None else self._router.stats

    @property
    def dead_error(self) -> JaxllmError | None:
        """Why the engine can't answer any more; None while it may, and after a shutdown that was asked for."""
        return self._start.error

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    @property
    def num_unfinished_requests(self) -> int:
        return 0 if self._router is None else len(self._router)

    def status(self) -> EngineStatus:
        """Says where the engine stands. Never waits; any thread may ask.

        A stalled engine gives no sign of life. It is ready again as soon as it does; requests wait until then.
        """
        error = self.dead_error
        if error is not None:
            return EngineStatus("dead", None, None, str(error))
        if self._start.is_stopped:
            return EngineStatus("dead", None, None, "the engine was shut down")
        if self._is_draining:
            return EngineStatus("draining", None, None, f"{self.num_unfinished_requests} requests are being finished")
        silent_s = self._start.silent_s
        if silent_s >= STALLED_S:
            return EngineStatus("stalled", None, None, f"no sign of life for {silent_s:g} s", silent_s >= HOPELESS_S)
        if self._start.result.done():
            return EngineStatus("ready", None, None, "")
        progress = self._start.progress
        return EngineStatus("loading", progress.percent, progress.eta_s, progress.phase)

    async def wait_ready(self) -> None:
        """Waits until the model is loaded.

        Raises:
          ConfigError: An engine argument breaks a rule.
          ModelLoadError: The model can't be found, read or run.
          DeviceError: A device can't be used.
          EngineDeadError: The engine has failed, or was shut down while it loaded.
        """
        await self._wait_started()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        final_only: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields what the request has so far, whenever that has grown, until it is finished.

        Each output holds everything up to that moment, so a slow reader misses none of it. Leaving the loop early,
        closing the iterator, dropping it or cancelling the task that reads it aborts the request.

        Args:
          prompt: Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; a dict may hold "cache_salt" too.
          sampling_params: How its tokens are chosen, and when they end.
          request_id: Any string that no live request has.
          priority: Smaller goes first, where the scheduling policy asks for it.
          final_only: Whether to yield once only, at the end.

        Raises:
          InvalidRequestError: The request breaks a rule. Comes before the first output.
          RequestFailedError: The engine failed at this request alone.
          EngineDeadError: The engine has failed, or shuts down.
        """
        arrival_time_s = time.monotonic()
        router, input_processor = self._open(await self._wait_started())
        processed = await self.offload(
            _size_of(prompt), input_processor.process, request_id, prompt, sampling_params, arrival_time_s, priority
        )
        self._check_alive()
        stream = router.add(request_id, processed, final_only)
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            router.drop(request_id, stream)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests; each one's reader gets a last output, finish_reason "abort". Unknown ids are ignored."""
        if self._router is not None:
            self._router.abort([request_ids] if isinstance(request_ids, str) else request_ids)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenizes without holding up the event loop. The engine must be ready."""
        return await self.offload(len(text), self.tokenizer.encode, text, add_special_tokens)

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turns token ids into text without holding up the event loop. The engine must be ready."""
        return await self.offload(len(token_ids), self.tokenizer.decode, token_ids, skip_special_tokens)

    async def offload(self, size: int, function: Callable[..., T], *args: Any) -> T:
        """Calls a function that has much to do with texts or tokens, on a thread if its input is large.

        The threads are few: with many that want to run, the event loop's would seldom have its turn.

        Args:
          size: How many characters or tokens there are.

        Raises:
          EngineDeadError: The engine has failed, or shuts down.
        """
        if size <= _INLINE_SIZE:
            return function(*args)
        self._check_alive()
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix. Returns False, and does nothing, while a request runs.

        Raises:
          EngineDeadError: The engine has failed.
        """
        return await (await self._wait_started()).client.reset_prefix_cache()

    async def get_stats(self) -> SchedulerStats:
        """Asks the scheduler for its counters of this moment; `stats` has those of the latest step.

        Raises:
          EngineDeadError: The engine has failed.
        """
        return total_stats(await self.get_stats_by_engine())

    async def get_stats_by_engine(self) -> list[SchedulerStats]:
        """The same of each engine core: there are several with data parallelism.

        Raises:
          EngineDeadError: The engine has failed.
        """
        return await (await self._wait_started()).client.get_stats()

    async def shutdown(self, drain_timeout_s: float = 0.0) -> None:
        """Takes no further request, lets those that run finish for some time, fails the rest, frees the device."""
        self._is_draining = True
        router = self._router
        if router is not None:
            if drain_timeout_s > 0 and not self.errored:
                await router.drain(drain_timeout_s)
            router.fail_all(EngineDeadError("the engine was shut down before the request was finished"))
        await asyncio.get_running_loop().run_in_executor(None, self.kill)
        if router is not None:
            router.close()

    def kill(self) -> None:
        """Ends the core and waits until its process has gone; requests get no answer any more. Idempotent.

        Any thread may call it, at any time, while loading too.
        """
        self._start.kill()
        self._threads.shutdown(wait=False)

    async def _wait_started(self) -> StartedEngine:
        result = self._start.result
        return result.result() if result.done() else await asyncio.shield(asyncio.wrap_future(result))

    def _open(self, started: StartedEngine) -> tuple[RequestRouter, InputProcessor]:
        """Returns what takes requests in and gives outputs out; made for the first request, on its event loop."""
        self._check_alive()
        if self._router is None or self._input_processor is None:
            config, tokenizer, eos_token_ids = started.front_end
            self._input_processor = InputProcessor(config, tokenizer, eos_token_ids, started.kv_cache_infos)
            self._router = RequestRouter(
                started.client, started.kv_cache_infos, tokenizer, self.stats_collector, self._start.fail
            )
        return self._router, self._input_processor

    def _check_alive(self) -> None:
        error = self.dead_error
        if error is not None:
            raise EngineDeadError(str(error))
        if self._is_draining or self._start.is_stopped:
            raise EngineDeadError("the engine is shutting down and takes no further request")


def _size_of(prompt: Any) -> int:
    """Returns how many characters or tokens a prompt has, if it is one."""
    if isinstance(prompt, dict):
        ids = prompt.get("prompt_token_ids")
        prompt = prompt.get("prompt") if ids is None else ids
    return len(prompt) if isinstance(prompt, (str, list, tuple)) else 0
