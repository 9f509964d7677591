"""The engine as both inference services see it: may a request come in, how is it run, what is it called.

Clients name their requests as they like, and two may choose the same name: the engine gets names of our own, and this
module remembers which are whose. Doesn't know messages.
"""

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Any

import grpc

from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.engine.input_processor import Prompt
from jaxllm.entrypoints.grpc_server.errors import Refusal
from jaxllm.entrypoints.grpc_server.rpc import request_id_of
from jaxllm.entrypoints.grpc_server.settings import GrpcSettings
from jaxllm.exceptions import InvalidRequestError
from jaxllm.logger import get_logger
from jaxllm.model_loader.generation_config import sampling_defaults
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_RETRY_LOADING_S = 5.0
_logger = get_logger(__name__)


class EngineDoor:
    """Runs requests on the engine, as long as it takes any.

    Attributes:
      last_output_time: When the engine last said something, in seconds since 1970; 0 before that.
    """

    def __init__(self, engine: AsyncLLMEngine, settings: GrpcSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.last_output_time = 0.0
        self._start_time_s = time.monotonic()
        self._counter = itertools.count()
        self._live: dict[str, list[str]] = {}  # the caller's name -> the engine's names
        self._is_closed = False  # no new requests
        self._is_over = False  # no requests at all
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def model_name(self) -> str:
        return self.settings.served_model_names[0]

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Values of sampling parameters that requests leave out. The engine must be ready."""
        return sampling_defaults(self.engine.config.generation_config)

    @property
    def is_ready(self) -> bool:
        return not self._is_closed and self.engine.status().phase == "ready"

    @property
    def num_requests(self) -> int:
        return sum(len(names) for names in self._live.values())

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._start_time_s

    def check_ready(self) -> None:
        """Raises: Refusal: The engine loads, drains or has died."""
        status = self.engine.status()
        phase = "draining" if self._is_closed and status.phase == "ready" else status.phase
        if phase == "loading":
            numbers = {"percent": status.percent, "eta_s": status.eta_s}
            raise Refusal(
                grpc.StatusCode.UNAVAILABLE,
                "MODEL_LOADING",
                f"the model is being loaded: {status.detail}",
                retry_after_s=status.eta_s or _RETRY_LOADING_S,
                metadata={"phase": phase} | {key: f"{value:g}" for key, value in numbers.items() if value is not None},
            )
        if phase == "draining":
            raise _draining("the server is shutting down and takes no further request")
        if phase == "dead":
            message = "the engine has stopped; no request can be answered any more"
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD", message, metadata={"phase": phase})

    def check_model(self, name: str) -> None:
        """Raises: Refusal: A model was asked for that isn't served here."""
        if name and name not in self.settings.served_model_names:
            served = ", ".join(self.settings.served_model_names)
            raise Refusal(
                grpc.StatusCode.NOT_FOUND,
                "MODEL_NOT_FOUND",
                f"model {name!r:.200} isn't served here; served: {served}",
                field="model",
            )

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        name: str,
        *,
        priority: int = 0,
        final_only: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields what AsyncLLMEngine.generate does, under the caller's name. Closing it aborts the request.

        Raises:
          Refusal: The engine takes no request now.
          QueueFullError: Too many wait.
          JaxllmError: What AsyncLLMEngine.generate raises.
        """
        self.check_ready()
        self._check_priority(priority)
        engine_id = f"grpc-{next(self._counter)}-{name}"
        start_s, outcome = time.monotonic(), "not finished"
        with self.settings.admission.admit(params.n) as ticket:
            self._enter(name, engine_id)
            try:
                outputs = self.engine.generate(prompt, params, engine_id, priority=priority, final_only=final_only)
                async with aclosing(outputs):
                    async for output in outputs:
                        ticket.start()
                        self.last_output_time = time.time()
                        if self._is_over and _is_aborted(output):
                            raise _draining("the server shut down before the request was finished")
                        yield output
                outcome = "finished"
            finally:
                self._leave(name, engine_id)
                if self.settings.logs_requests:
                    _logger.info("%s: gRPC request %s after %d ms", name, outcome, 1000 * (time.monotonic() - start_s))

    async def abort(self, names: Sequence[str]) -> list[str]:
        """Aborts the requests of these names and returns those names that had any."""
        live = [name for name in dict.fromkeys(names) if name in self._live]
        await self.engine.abort([engine_id for name in live for engine_id in self._live[name]])
        return live

    async def close(self, grace_s: float) -> None:
        """Takes no further request, waits up to `grace_s` for those that run, and refuses the rest."""
        self._is_closed = True
        await self.wait_idle(grace_s)
        self._is_over = True
        await self.abort(list(self._live))

    async def wait_idle(self, timeout_s: float) -> None:
        """Waits until no request runs that came in here, but not longer than `timeout_s`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)

    def _check_priority(self, priority: int) -> None:
        if priority and self.engine.config.scheduler.policy != "priority":
            raise InvalidRequestError("priority needs a server that was started with --policy priority", "priority")

    def _enter(self, name: str, engine_id: str) -> None:
        self._live.setdefault(name, []).append(engine_id)
        self._is_idle.clear()

    def _leave(self, name: str, engine_id: str) -> None:
        self._live[name].remove(engine_id)
        if not self._live[name]:
            del self._live[name]
        if not self._live:
            self._is_idle.set()


def _is_aborted(output: RequestOutput) -> bool:
    return any(completion.finish_reason == "abort" for completion in output.outputs)


def _draining(message: str) -> Refusal:
    return Refusal(
        grpc.StatusCode.UNAVAILABLE,
        "DRAINING",
        message,
        retry_after_s=_RETRY_LOADING_S,
        metadata={"phase": "draining"},
    )


def new_request_id(request: Any, context: grpc.aio.ServicerContext) -> str:
    """Returns the caller's name for a request, or a new one if he has none.

    It is request_id, or x-request-id metadata where that is one of ours.

    Raises:
      InvalidRequestError: request_id isn't made of the characters of names, or is too long.
    """
    if request.request_id:
        if not _REQUEST_ID.fullmatch(request.request_id):
            raise InvalidRequestError(
                f"request_id must be 1 to 128 letters, digits and . _ : -, got {request.request_id!r:.80}",
                "request_id",
            )
        return str(request.request_id)
    given = request_id_of(request, context)
    return given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(16)}"
