"""LLMEngine: add_request, abort_request, step. The synchronous engine; its core runs here or in a process of its own.

It joins InputProcessor, EngineCoreClient and OutputProcessor, and does none of their work.
"""

import time
from collections.abc import Iterable
from typing import Literal

from jaxllm.config import EngineConfig
from jaxllm.engine.data_parallel_link import connect_core, connect_replica_threads
from jaxllm.engine.engine_core import EngineCore
from jaxllm.engine.engine_core_client import EngineCoreClient, InprocClient
from jaxllm.engine.front_end import load_front_end
from jaxllm.engine.input_processor import InputProcessor, Prompt
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.engine.stats import LatestStats, total_stats
from jaxllm.engine.sync_mp_client import SyncMPClient
from jaxllm.engine_args import EngineArgs
from jaxllm.exceptions import ConfigError, InvalidRequestError, RequestFailedError
from jaxllm.executor.executor import make_executor
from jaxllm.messages import SchedulerStats
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.tokenizer.tokenizer import Tokenizer

EngineProcess = Literal["mp", "inproc"]
# A process of its own costs nothing that could be measured where the device sets the pace (README, "Where the core
# runs"), hides the front end's work behind the device's where it doesn't, and gives the device back whole when it ends.
DEFAULT_ENGINE_PROCESS: EngineProcess = "mp"


class LLMEngine:
    """Runs requests step by step; each step changes every request that it finds room for.

    Attributes:
      config: What the engine was made from.
      tokenizer: The model's tokenizer.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        client: EngineCoreClient,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._stats = LatestStats(client.kv_cache_infos)
        self._client = client
        self._input_processor = InputProcessor(config, tokenizer, list(eos_token_ids), client.kv_cache_infos)
        self._output_processor = OutputProcessor(tokenizer)
        self._pending: list[RequestOutput] = []  # given out by the next step: aborts, mostly

    @property
    def stats(self) -> SchedulerStats | None:
        """The scheduler's counters after the latest step, None before the first. Of all replicas together."""
        return self._stats.total()

    @classmethod
    def from_engine_args(cls, args: EngineArgs, engine_process: EngineProcess = DEFAULT_ENGINE_PROCESS) -> "LLMEngine":
        """Loads the model and returns an engine that is ready to run.

        Args:
          args: What the engine is made from.
          engine_process: Where its core runs. "mp": in a process of its own; "inproc": in this one, and several
            data parallel replicas on threads of it.

        Raises:
          ConfigError: An engine argument breaks a rule.
          ModelLoadError: The model can't be found, read or run.
          DeviceError: A device can't be used.
        """
        config, tokenizer, eos_token_ids = load_front_end(args)
        return cls(config, tokenizer, make_client(config, engine_process), eos_token_ids)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
        final_only: bool = False,
    ) -> None:
        """Adds one request. If it raises, nothing has changed.

        Args:
          request_id: Any string that no live request has.
          prompt: Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; a dict may hold "cache_salt" too.
          sampling_params: How its tokens are chosen, and when they end.
          arrival_time: Seconds of the monotonic clock; None means now.
          priority: Smaller goes first, where the scheduling policy asks for it.
          final_only: Whether `step` returns this request only once it has finished. That is cheaper: each output
            copies all tokens so far.

        Raises:
          InvalidRequestError: The request breaks a rule.
        """
        if isinstance(request_id, str) and request_id in self._output_processor:
            raise InvalidRequestError(f"request_id {request_id!r:.80} is in use; choose another", "request_id")
        arrival_time_s = time.monotonic() if arrival_time is None else arrival_time
        processed = self._input_processor.process(request_id, prompt, sampling_params, arrival_time_s, priority)
        self._output_processor.add_request(request_id, processed.core_request, processed.prompt, final_only)
        try:
            self._client.add_request(processed.core_request)
        except BaseException:
            self._output_processor.remove_request(request_id)
            raise

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests; the next step returns their last outputs, finish_reason "abort".

        Ids that no live request has are ignored.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        core_ids = [self._output_processor.core_id_of(request_id) for request_id in dict.fromkeys(ids)]
        live = [core_id for core_id in core_ids if core_id is not None]
        self._pending += self._output_processor.abort_requests(ids)
        if live:
            self._client.abort_requests(live)

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns the requests that it changed, each with all it has so far.

        Requests that were added with final_only are among them only when they have finished.

        Raises:
          RequestFailedError: The engine failed at one request, which is forgotten; the others go on.
          EngineDeadError: The engine has failed; no request will be answered any more.
        """
        aborted, self._pending = self._pending, []
        if not self._output_processor.has_unfinished_requests():
            return aborted
        core_outputs = self._client.get_output()
        self._stats.update(core_outputs)
        processed = self._output_processor.process_outputs(core_outputs)
        for request_id, index in processed.stopped_sequences:
            self._client.finish_sequence(request_id, index)
        outputs = aborted + processed.request_outputs
        for refused in core_outputs.refused:
            if self._output_processor.remove_core_request(refused.request_id) is not None:
                self._pending = outputs  # nothing of the others is lost
                raise RequestFailedError(refused.message)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to give out."""
        return bool(self._pending) or self._output_processor.has_unfinished_requests()

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix, as after a change of weights.

        Returns:
          Whether it did: while a request runs it does nothing and returns False.
        """
        return self._client.reset_prefix_cache()

    def get_stats(self) -> SchedulerStats:
        """Asks the scheduler for its counters of this moment; `stats` has those of the latest step."""
        return total_stats(self._client.get_stats())

    def shutdown(self) -> None:
        """Frees the device. The engine can't be used afterwards; a second call does nothing."""
        self._client.shutdown()


def make_client(config: EngineConfig, engine_process: EngineProcess) -> EngineCoreClient:
    """Starts a core and returns the client of it.

    Raises:
      ConfigError, ModelLoadError, DeviceError, EngineDeadError: The core can't start.
    """
    if config.parallel.distributed_executor_backend == "external_launcher":
        engine_process = "inproc"  # a core of its own would step while requests are still being added
    match engine_process:
        case "mp":
            return SyncMPClient(config, connect_core)
        case "inproc" if config.parallel.data_parallel_size > 1:
            return SyncMPClient(config, connect_replica_threads)
        case "inproc":
            return InprocClient(EngineCore(config, make_executor(config)))
        case other:
            raise ConfigError(f'engine_process must be "mp" or "inproc", got {other!r:.80}')
