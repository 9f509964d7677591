"""RequestRouter: takes each output to the stream of its request. Belongs to one event loop.

Knows the requests that run, and nothing of how they came to be or of how the engine started.
"""

import asyncio
import time
from collections.abc import Callable, Iterable

from jaxllm.engine.async_mp_client import AsyncMPClient
from jaxllm.engine.input_processor import ProcessedRequest
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.engine.request_stream import RequestStream
from jaxllm.engine.stats import LatestStats, StatsCollector
from jaxllm.exceptions import EngineDeadError, InvalidRequestError, JaxllmError, RequestFailedError
from jaxllm.logger import get_logger
from jaxllm.messages import EngineCoreOutput, KVCacheInfo, RefusedRequest, SchedulerStats
from jaxllm.tokenizer.tokenizer import Tokenizer

_logger = get_logger(__name__)

_OUTPUTS_PER_SLICE = 128  # a few milliseconds of work: others on the event loop shouldn't wait longer


class RequestRouter:
    """One stream a request, and one task that feeds them all.

    Args:
      client: Of cores that are ready.
      kv_cache_infos: What they allocated.
      tokenizer: The model's.
      stats_collector: Follows each request.
      on_fault: Told when the task has failed by a fault of ours: nobody will get an answer any more.
    """

    def __init__(
        self,
        client: AsyncMPClient,
        kv_cache_infos: Iterable[KVCacheInfo],
        tokenizer: Tokenizer,
        stats_collector: StatsCollector,
        on_fault: Callable[[JaxllmError], None],
    ) -> None:
        self._stats = LatestStats(kv_cache_infos)
        self._client = client
        self._output_processor = OutputProcessor(tokenizer)
        self._stats_collector = stats_collector
        self._on_fault = on_fault
        self._streams: dict[str, RequestStream] = {}  # by request id
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def stats(self) -> SchedulerStats | None:
        """The counters of the latest step, None before the first. Of all engine cores together."""
        return self._stats.total()

    def add(self, request_id: str, processed: ProcessedRequest, final_only: bool) -> RequestStream:
        """Makes the place where a request's outputs go, then sends the request: so none can be lost.

        Raises:
          InvalidRequestError: A live request has that id, or the request can't be sent.
        """
        output_processor = self._output_processor
        if request_id in output_processor:
            raise InvalidRequestError(f"request_id {request_id!r:.80} is in use; choose another", "request_id")
        stream = RequestStream(lambda: output_processor.snapshot(request_id))
        output_processor.add_request(request_id, processed.core_request, processed.prompt, final_only)
        self._stats_collector.added(processed.core_request)
        self._streams[request_id] = stream
        self._is_idle.clear()
        try:
            self._client.add_request(processed.core_request)
        except (TypeError, ValueError, OverflowError) as error:
            self.drop(request_id, stream)
            raise InvalidRequestError(f"the request can't be sent to the engine: {error}") from error
        return stream

    def drop(self, request_id: str, stream: RequestStream) -> None:
        """Forgets a request whose reader has gone; does nothing if it has ended."""
        if self._streams.get(request_id) is not stream:
            return
        core_id = self._core_id(request_id)
        self._client.abort_requests([core_id])
        self._stats_collector.ended(core_id, None, time.monotonic())
        self._output_processor.remove_request(request_id)
        self._pop_stream(request_id)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests; each one's reader gets a last output, finish_reason "abort". Unknown ids are ignored."""
        live = [request_id for request_id in dict.fromkeys(request_ids) if request_id in self._streams]
        core_ids = [self._core_id(request_id) for request_id in live]
        if core_ids:
            self._client.abort_requests(core_ids)
        for core_id in core_ids:
            self._stats_collector.ended(core_id, None, time.monotonic())
        for output in self._output_processor.abort_requests(live):
            self._pop_stream(output.request_id).finish(output)

    def fail_all(self, error: JaxllmError) -> None:
        """Ends every request with an error."""
        for request_id in list(self._streams):
            self._stats_collector.ended(self._core_id(request_id), None, time.monotonic())
            self._output_processor.remove_request(request_id)
            self._pop_stream(request_id).fail(error)

    async def drain(self, timeout_s: float) -> None:
        """Waits until no request is left, or the time is over."""
        try:
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        except TimeoutError:
            _logger.warning("%d requests were not finished in %g s", len(self._streams), timeout_s)

    def close(self) -> None:
        self._task.cancel()

    def _core_id(self, request_id: str) -> str:
        core_id = self._output_processor.core_id_of(request_id)
        assert core_id is not None
        return core_id

    def _pop_stream(self, request_id: str) -> RequestStream:
        stream = self._streams.pop(request_id)
        if not self._streams:
            self._is_idle.set()
        return stream

    async def _run(self) -> None:
        """Hands outputs to their streams, for ever, a slice at a time.

        Others get their turn after a slice, or when nothing waits: where steps come faster than readers can follow,
        the outputs don't pile up here, and a reader gets several tokens at once.
        """
        num_routed = 0  # in this slice
        try:
            while True:
                outputs = await self._client.get_output()
                self._stats.update(outputs)
                for refused in outputs.refused:
                    self._refuse(refused)
                now_s = time.monotonic()
                self._stats_collector.stepped(outputs, now_s)
                for news in outputs.outputs:
                    self._route(news, now_s)
                    num_routed += 1
                    if num_routed == _OUTPUTS_PER_SLICE:
                        num_routed = 0
                        await asyncio.sleep(0)
        except EngineDeadError as error:
            self.fail_all(error)
        except Exception as error:
            _logger.exception("the output task has failed")
            fault = EngineDeadError(f"the output task has failed: {type(error).__name__}: {error}")
            self._on_fault(fault)
            self.fail_all(fault)

    def _refuse(self, refused: RefusedRequest) -> None:
        self._stats_collector.refused(refused.request_id)
        request_id = self._output_processor.remove_core_request(refused.request_id)
        if request_id is None:
            return
        if refused.is_our_fault:
            self._pop_stream(request_id).fail(RequestFailedError(refused.message))
        else:
            self._pop_stream(request_id).fail(InvalidRequestError(refused.message, refused.param))

    def _route(self, news: EngineCoreOutput, now_s: float) -> None:
        """Takes one request's news to its stream. An error in its text is that request's alone."""
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
            self._stats_collector.ended(news.request_id, updated.final_output, now_s)
            self._pop_stream(updated.request_id).finish(updated.final_output)
        elif updated.is_visible:
            self._streams[updated.request_id].mark()
