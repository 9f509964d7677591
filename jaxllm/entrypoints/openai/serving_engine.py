"""What every handler needs of the engine: is it ready, is the model's name ours, may this request come in, its outputs.

Knows no request body and no answer's form.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.engine.input_processor import Prompt
from jaxllm.entrypoints.admission import AdmissionControl, QueueFullError
from jaxllm.entrypoints.openai.errors import RETRY_LOADING_S, ApiError, model_not_found, queue_full
from jaxllm.exceptions import EngineDeadError, InvalidRequestError
from jaxllm.model_loader.generation_config import sampling_defaults
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams

MAX_PROMPTS = 256  # of one request

# The output of one of a request's prompts, and which prompt that is.
IndexedOutput = tuple[int, RequestOutput]


class ServingEngine:
    """The engine behind the HTTP routes.

    Args:
      engine: May still be loading.
      served_model_names: What clients call the model; answers carry the first.
      admission: Who may wait.

    Attributes:
      created: When serving began, in seconds of the wall clock.
      is_draining: Whether no new requests are taken because the server is about to end.
      was_ready: Whether requests have ever been taken.
    """

    def __init__(
        self,
        engine: AsyncLLMEngine,
        served_model_names: Sequence[str],
        admission: AdmissionControl,
    ) -> None:
        self.engine = engine
        self.served_model_names = tuple(served_model_names)
        self.admission = admission
        self.created = int(time.time())
        self.is_draining = False
        self.was_ready = False

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Values of sampling parameters that requests leave out. The engine must be ready."""
        return sampling_defaults(self.engine.config.generation_config)

    def model_of(self, name: str | None) -> str:
        """Returns the name that an answer carries.

        Raises:
          ApiError: 404, nothing by that name is served.
        """
        if name is not None and name not in self.served_model_names:
            raise model_not_found(name, self.served_model_names)
        return self.served_model_names[0] if name is None else name

    def check_ready(self) -> None:
        """Raises ApiError 503 while the engine can't take requests."""
        status = self.engine.status()
        if self.is_draining or status.phase == "draining":
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=RETRY_LOADING_S)
        if status.phase == "loading" or status.phase == "ready" and not self.was_ready:
            retry_after_s = RETRY_LOADING_S if status.eta_s is None else max(1, int(status.eta_s) + 1)
            raise ApiError(503, "the model is loading; see /health", code="loading", retry_after_s=retry_after_s)
        if status.phase == "dead":
            raise ApiError(503, "the engine has stopped; no request can be answered any more", code="engine_dead")

    def check_priority(self, priority: int | None) -> None:
        """Raises InvalidRequestError for a priority that would change nothing."""
        if priority and self.engine.config.scheduler.policy != "priority":
            raise InvalidRequestError("priority needs a server that was started with --policy priority", "priority")

    async def run(
        self, prompts: Sequence[Prompt], params: SamplingParams, priority: int = 0, final_only: bool = False
    ) -> AsyncGenerator[IndexedOutput, None]:
        """Yields the outputs of several prompts as they come, each with all that its prompt has so far.

        Closing the generator aborts what still runs.

        Args:
          prompts: In the order of their numbers.
          params: For all of them.
          priority: Smaller goes first, where the policy asks for it.
          final_only: Whether each prompt yields once only, at its end.

        Raises:
          ApiError: 429, too many requests wait.
          InvalidRequestError: A prompt or a parameter breaks a rule.
          EngineDeadError: The engine has failed.
        """
        try:
            ticket = self.admission.admit(len(prompts) * params.n)
        except QueueFullError as error:
            raise queue_full(str(error), error.retry_after_s) from None
        with ticket:
            async with aclosing(self._outputs(prompts, params, priority, final_only)) as outputs:
                try:
                    async for item in outputs:
                        ticket.start()
                        yield item
                except EngineDeadError:
                    if self.is_draining:
                        message = "the server was shut down before this request was answered"
                        raise ApiError(503, message, code="shutting_down") from None
                    raise

    def _outputs(
        self, prompts: Sequence[Prompt], params: SamplingParams, priority: int, final_only: bool
    ) -> AsyncGenerator[IndexedOutput, None]:
        streams = []
        for prompt in prompts:
            request_id = f"req-{uuid4().hex}"  # the client's own is a label: two clients may choose the same
            streams.append(self.engine.generate(prompt, params, request_id, priority=priority, final_only=final_only))
        return _merged(streams) if len(streams) > 1 else _numbered(streams[0], 0)


async def _numbered(stream: AsyncGenerator[RequestOutput, None], index: int) -> AsyncGenerator[IndexedOutput, None]:
    async with aclosing(stream):
        async for output in stream:
            yield index, output


async def _merged(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> AsyncGenerator[IndexedOutput, None]:
    """Yields from all streams as items come. A reader that is slow holds each stream up, not only the first."""
    queue: asyncio.Queue[IndexedOutput | BaseException | None] = asyncio.Queue(maxsize=1)

    async def pump(index: int) -> None:
        try:
            async for item in _numbered(streams[index], index):
                await queue.put(item)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(index)) for index in range(len(streams))]
    try:
        num_running = len(tasks)
        while num_running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answer_id(prefix: str) -> str:
    """Returns a fresh id such as "cmpl-0123..."."""
    return f"{prefix}-{uuid4().hex}"
