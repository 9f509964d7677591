"""AsyncLLMEngine: `async for output in engine.generate(...)`. The engine of the servers, on one asyncio event loop.

It joins InputProcessor, AsyncMPClient and OutputProcessor, and does none of their work. How many requests may wait is
the servers' business.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from jaxllm.config import EngineConfig
from jaxllm.engine.async_mp_client import AsyncMPClient
from jaxllm.engine.core_link import Connect
from jaxllm.engine.core_messages import EngineFailed, FromCore, LoadProgress, Ready
from jaxllm.engine.core_process import CoreProcess
from jaxllm.engine.front_end import FrontEnd, load_front_end
from jaxllm.engine.input_processor import InputProcessor, ProcessedRequest, Prompt
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.engine.request_stream import RequestStream
from jaxllm.engine.stats import StatsCollector
from jaxllm.engine_args import EngineArgs
from jaxllm.exceptions import (
    EngineDeadError,
    InvalidRequestError,
    JaxllmError,
    RequestFailedError,
    from_name,
)
from jaxllm.logger import get_logger
from jaxllm.messages import EngineCoreOutput, KVCacheInfo, RefusedRequest, SchedulerStats
from jaxllm.outputs import RequestOutput
from jaxllm.progress import reporting_to
from jaxllm.sampling_params import SamplingParams
from jaxllm.tokenizer.tokenizer import Tokenizer

_logger = get_logger(__name__)
T = TypeVar("T")

_OUTPUTS_PER_SLICE = 128  # a few milliseconds of work: others on the event loop shouldn't wait longer
_INLINE_SIZE = 4096  # characters or tokens; handing less than this to a thread costs more than doing it
_NUM_THREADS = 2


class EngineStatus(NamedTuple):
    phase: Literal["loading", "ready", "draining", "dead"]
    percent: float | None  # of what `detail` names; only while loading
    eta_s: float | None
    detail: str


class AsyncLLMEngine:
    """Answers any number of requests at once. Make it, then use it from one event loop.

    Loading begins at once, on a thread; `status` tells how far it is.

    Args:
      load: Returns the front end's parts. Runs on a thread.
      connect: Starts the core.

    Attributes:
      stats: The scheduler's counters of the latest step, None before the first.
      stats_collector: Follows each request. Whoever wants the numbers puts his own here before the first request.
      kv_cache_info: What the core allocated, None while it loads.
    """

    def __init__(self, load: Callable[[], FrontEnd], connect: Connect = CoreProcess) -> None:
        self.stats: SchedulerStats | None = None
        self.stats_collector = StatsCollector([])
        self.kv_cache_info: KVCacheInfo | None = None
        self._connect = connect
        self._progress = LoadProgress("opening the model")
        self._front_end: FrontEnd | None = None
        self._client: AsyncMPClient | None = None
        self._own_error: JaxllmError | None = None
        self._loaded: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._lock = threading.Lock()  # guards _client and _is_stopped while loading
        self._is_draining = False
        self._is_stopped = False
        self._input_processor: InputProcessor | None = None
        self._output_processor: OutputProcessor | None = None
        self._streams: dict[str, RequestStream] = {}  # by request id
        self._output_task: asyncio.Task[None] | None = None
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._threads = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "tokenizer")
        threading.Thread(target=self._load, args=(load,), name="engine-loader", daemon=True).start()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "AsyncLLMEngine":
        """Returns at once an engine that loads in the background. What is wrong with `args`, wait_ready tells."""
        return cls(lambda: load_front_end(args))

    @property
    def config(self) -> EngineConfig:
        """What the engine was made from. It must be ready."""
        assert self._front_end is not None, "wait_ready first"
        return self._front_end.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. The engine must be ready."""
        assert self._front_end is not None, "wait_ready first"
        return self._front_end.tokenizer

    @property
    def dead_error(self) -> JaxllmError | None:
        """Why the engine can't answer any more; None while it may, and after a shutdown that was asked for."""
        if self._is_stopped:
            return None
        return self._own_error or (self._client.error if self._client is not None else None)

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._streams)

    def status(self) -> EngineStatus:
        """Says where the engine stands. Never waits; any thread may ask."""
        error = self.dead_error
        if error is not None:
            return EngineStatus("dead", None, None, str(error))
        if self._is_stopped:
            return EngineStatus("dead", None, None, "the engine was shut down")
        if self._is_draining:
            return EngineStatus("draining", None, None, f"{len(self._streams)} requests are being finished")
        if self._loaded.done():
            return EngineStatus("ready", None, None, "")
        progress = self._progress
        return EngineStatus("loading", progress.percent, progress.eta_s, progress.phase)

    async def wait_ready(self) -> None:
        """Waits until the model is loaded.

        Raises:
          ConfigError: An engine argument breaks a rule.
          ModelLoadError: The model can't be found, read or run.
          DeviceError: A device can't be used.
          EngineDeadError: The engine has failed, or was shut down while it loaded.
        """
        if not self._loaded.done():
            await asyncio.shield(asyncio.wrap_future(self._loaded))
        self._loaded.result()

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
        await self.wait_ready()
        self._check_alive()
        assert self._input_processor is not None
        processed = await self._offload(
            _size_of(prompt),
            self._input_processor.process,
            request_id,
            prompt,
            sampling_params,
            arrival_time_s,
            priority,
        )
        stream = self._register(request_id, processed, final_only)
        try:
            self._send(processed)
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self._drop(request_id, stream)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests; each one's reader gets a last output, finish_reason "abort". Unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        live = [request_id for request_id in dict.fromkeys(ids) if request_id in self._streams]
        if not live:
            return
        assert self._output_processor is not None and self._client is not None
        core_ids = [self._core_id(request_id) for request_id in live]
        self._client.abort_requests(core_ids)
        for core_id in core_ids:
            self.stats_collector.ended(core_id, None, time.monotonic())
        for output in self._output_processor.abort_requests(live):
            self._pop_stream(output.request_id).finish(output)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenizes without holding up the event loop. The engine must be ready."""
        return await self._offload(len(text), self.tokenizer.encode, text, add_special_tokens)

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turns token ids into text without holding up the event loop. The engine must be ready."""
        return await self._offload(len(token_ids), self.tokenizer.decode, token_ids, skip_special_tokens)

    async def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix. Returns False, and does nothing, while a request runs.

        Raises:
          EngineDeadError: The engine has failed.
        """
        await self.wait_ready()
        assert self._client is not None
        return await self._client.reset_prefix_cache()

    async def get_stats(self) -> SchedulerStats:
        """Asks the scheduler for its counters of this moment; `stats` has those of the latest step.

        Raises:
          EngineDeadError: The engine has failed.
        """
        await self.wait_ready()
        assert self._client is not None
        return await self._client.get_stats()

    async def shutdown(self, drain_timeout_s: float = 0.0) -> None:
        """Takes no further request, lets those that run finish for some time, fails the rest, frees the device."""
        self._is_draining = True
        if not self.errored and self._streams and drain_timeout_s > 0:
            try:
                await asyncio.wait_for(self._is_idle.wait(), drain_timeout_s)
            except TimeoutError:
                _logger.warning("%d requests were not finished in %g s", len(self._streams), drain_timeout_s)
        self._fail_all(EngineDeadError("the engine was shut down before the request was finished"))
        await asyncio.get_running_loop().run_in_executor(None, self.kill)
        if self._output_task is not None:
            self._output_task.cancel()

    def kill(self) -> None:
        """Ends the core and waits until its process has gone; requests get no answer any more. Idempotent.

        Any thread may call it, at any time, while loading too.
        """
        with self._lock:
            if self.dead_error is None:
                self._is_stopped = True
            client = self._client
        if client is not None:
            client.shutdown()
        self._end_loading(EngineDeadError("the engine was shut down while it loaded"))
        self._threads.shutdown(wait=False)

    def _load(self, load: Callable[[], FrontEnd]) -> None:
        """Reads what the front end needs, then starts the core. Runs on a thread of its own."""
        try:
            with reporting_to(self._report):
                front_end = load()
            with self._lock:
                if self._is_stopped:
                    return
                self._front_end = front_end
                self._progress = LoadProgress("starting the engine process")
                self._client = AsyncMPClient(front_end.config, self._connect, self._take_state)
        except JaxllmError as error:
            self._end_loading(error)
        except Exception as error:
            _logger.exception("the model can't be loaded")
            self._end_loading(EngineDeadError(f"loading failed: {type(error).__name__}: {error}"))

    def _report(self, phase: str, percent: float | None, eta_s: float | None) -> None:
        self._progress = LoadProgress(phase, percent, eta_s)

    def _take_state(self, message: FromCore) -> None:
        """Takes what the core says about itself, on its link's thread."""
        match message:
            case LoadProgress():
                self._progress = message
            case Ready():
                assert self._front_end is not None
                config, tokenizer, eos_token_ids = self._front_end
                self.kv_cache_info = message.kv_cache_info
                self._input_processor = InputProcessor(config, tokenizer, eos_token_ids, message.kv_cache_info)
                self._output_processor = OutputProcessor(tokenizer)
                self._end_loading(None)
            case EngineFailed():
                self._end_loading(from_name(message.error, message.message))

    def _end_loading(self, error: JaxllmError | None) -> None:
        with self._lock:
            if self._loaded.done():
                return
            self._own_error = error
            if error is None:
                self._loaded.set_result(None)
            else:
                self._loaded.set_exception(error)

    def _check_alive(self) -> None:
        error = self.dead_error
        if error is not None:
            raise EngineDeadError(str(error))
        if self._is_draining or self._is_stopped:
            raise EngineDeadError("the engine is shutting down and takes no further request")

    def _register(self, request_id: str, processed: ProcessedRequest, final_only: bool) -> RequestStream:
        """Makes the place where a request's outputs go. Nothing has been sent yet, so none can be lost."""
        self._check_alive()
        output_processor = self._output_processor
        assert output_processor is not None
        if request_id in output_processor:
            raise InvalidRequestError(f"request_id {request_id!r:.80} is in use; choose another", "request_id")
        stream = RequestStream(lambda: output_processor.snapshot(request_id))
        output_processor.add_request(request_id, processed.core_request, processed.prompt, final_only)
        self.stats_collector.added(processed.core_request)
        self._streams[request_id] = stream
        self._is_idle.clear()
        if self._output_task is None:
            self._output_task = asyncio.get_running_loop().create_task(self._run_output_task())
        return stream

    def _send(self, processed: ProcessedRequest) -> None:
        assert self._client is not None
        try:
            self._client.add_request(processed.core_request)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(f"the request can't be sent to the engine: {error}") from error

    def _drop(self, request_id: str, stream: RequestStream) -> None:
        """Forgets a request whose reader has gone, or has read all."""
        if self._streams.get(request_id) is not stream:
            return
        assert self._output_processor is not None and self._client is not None
        core_id = self._core_id(request_id)
        self._client.abort_requests([core_id])
        self.stats_collector.ended(core_id, None, time.monotonic())
        self._output_processor.remove_request(request_id)
        self._pop_stream(request_id)

    def _core_id(self, request_id: str) -> str:
        assert self._output_processor is not None
        core_id = self._output_processor.core_id_of(request_id)
        assert core_id is not None
        return core_id

    def _pop_stream(self, request_id: str) -> RequestStream:
        stream = self._streams.pop(request_id)
        if not self._streams:
            self._is_idle.set()
        return stream

    def _fail_all(self, error: JaxllmError) -> None:
        for request_id in list(self._streams):
            assert self._output_processor is not None
            self.stats_collector.ended(self._core_id(request_id), None, time.monotonic())
            self._output_processor.remove_request(request_id)
            self._pop_stream(request_id).fail(error)

    async def _run_output_task(self) -> None:
        """Hands outputs to their streams, for ever, a slice at a time."""
        assert self._client is not None
        try:
            while True:
                outputs = await self._client.get_output()
                self.stats = outputs.stats
                for refused in outputs.refused:
                    self._refuse(refused)
                now_s = time.monotonic()
                self.stats_collector.stepped(outputs, now_s)
                for start in range(0, len(outputs.outputs), _OUTPUTS_PER_SLICE):
                    for news in outputs.outputs[start : start + _OUTPUTS_PER_SLICE]:
                        self._route(news, now_s)
                    await asyncio.sleep(0)
        except EngineDeadError as error:
            self._fail_all(error)
        except Exception as error:  # a fault of ours: nobody would get an answer any more
            _logger.exception("the output task has failed")
            self._own_error = EngineDeadError(f"the output task has failed: {type(error).__name__}: {error}")
            self._fail_all(self._own_error)

    def _refuse(self, refused: RefusedRequest) -> None:
        assert self._output_processor is not None
        self.stats_collector.refused(refused.request_id)
        request_id = self._output_processor.remove_core_request(refused.request_id)
        if request_id is None:
            return
        if refused.is_our_fault:
            self._pop_stream(request_id).fail(RequestFailedError(refused.message))
        else:
            self._pop_stream(request_id).fail(InvalidRequestError(refused.message, refused.param))

    def _route(self, news: EngineCoreOutput, now_s: float) -> None:
        """Takes one request's news to its stream. An error in here is that request's alone."""
        assert self._output_processor is not None and self._client is not None
        try:
            updated = self._output_processor.process_output(news, now_s)
        except Exception:
            _logger.exception("request %s: its output can't be processed", news.request_id)
            self._client.abort_requests([news.request_id])
            self._refuse(RefusedRequest(news.request_id, "the engine failed to read the answer", is_our_fault=True))
            return
        if updated is None:
            return
        for index in updated.stopped:
            self._client.finish_sequence(news.request_id, index)
        if updated.final_output is not None:
            self.stats_collector.ended(news.request_id, updated.final_output, now_s)
            self._pop_stream(updated.request_id).finish(updated.final_output)
        elif updated.is_visible:
            self._streams[updated.request_id].mark()

    async def _offload(self, size: int, function: Callable[..., T], *args: Any) -> T:
        """Calls a function, on a thread if its input is large."""
        if size <= _INLINE_SIZE:
            return function(*args)
        self._check_alive()
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)


def _size_of(prompt: Any) -> int:
    """Returns how many characters or tokens a prompt has, if it is one."""
    if isinstance(prompt, dict):
        ids = prompt.get("prompt_token_ids")
        prompt = prompt.get("prompt") if ids is None else ids
    return len(prompt) if isinstance(prompt, (str, list, tuple)) else 0
