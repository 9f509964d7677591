"""An EngineCoreClient that answers from a script, one token a sequence and step. No scheduler, no device."""

from collections.abc import Callable, Sequence

from jaxllm.engine.engine_core_client import EngineCoreClient
from jaxllm.exceptions import InvalidRequestError
from jaxllm.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    KVCacheInfo,
    SampledToken,
    SchedulerStats,
    SequenceOutput,
    TokenLogprobs,
)

KV_CACHE_INFO = KVCacheInfo(num_device_blocks=65, block_size=16, max_num_seqs=256, max_num_batched_tokens=2048)
STATS = SchedulerStats(0, 0, 0, 0, 0, 0, 0)
# (request, index of the sequence) -> its tokens. A script that runs dry repeats its last token.
Script = Callable[[EngineCoreRequest, int], Sequence[int]]


class ScriptedClient(EngineCoreClient):
    """Runs every request at once; sequences end at an EOS, a stop token id, or max_tokens.

    Attributes:
      calls: What was asked besides add_request: ("abort", ids), ("finish", id, index) or
        ("reset_prefix_cache",).
      requests: Every request that was accepted.
      refuses: Callers' request ids that add_request refuses.
    """

    def __init__(self, script: Script) -> None:
        self.kv_cache_infos = [KV_CACHE_INFO]
        self.calls: list[tuple[object, ...]] = []
        self.requests: list[EngineCoreRequest] = []
        self.refuses: set[str] = set()
        self.is_shut_down = False
        self._script = script
        self._live: dict[str, EngineCoreRequest] = {}
        self._num_tokens: dict[tuple[str, int], int] = {}  # of the sequences that run

    def add_request(self, request: EngineCoreRequest) -> None:
        if request.request_id.rpartition("-")[0] in self.refuses:
            raise InvalidRequestError("too large for the block pool")
        self.requests.append(request)
        self._live[request.request_id] = request
        for index in range(request.sampling_params.n):
            self._num_tokens[request.request_id, index] = 0

    def abort_requests(self, request_ids: list[str]) -> None:
        self.calls.append(("abort", request_ids))
        for request_id in request_ids:
            self._live.pop(request_id, None)
            self._num_tokens = {key: count for key, count in self._num_tokens.items() if key[0] != request_id}

    def finish_sequence(self, request_id: str, index: int) -> None:
        self.calls.append(("finish", request_id, index))
        self._num_tokens.pop((request_id, index), None)
        self._forget_if_finished(request_id)

    def reset_prefix_cache(self) -> bool:
        self.calls.append(("reset_prefix_cache",))
        return not self._live

    def get_stats(self) -> list[SchedulerStats]:
        return [STATS]

    def get_output(self) -> EngineCoreOutputs:
        return EngineCoreOutputs([self._advance(request) for request in list(self._live.values())], STATS)

    def has_unfinished_requests(self) -> bool:
        return bool(self._live)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _advance(self, request: EngineCoreRequest) -> EngineCoreOutput:
        is_first = all(not count for (name, _), count in self._num_tokens.items() if name == request.request_id)
        sequences = [self._next(request, index) for name, index in list(self._num_tokens) if name == request.request_id]
        wants = request.sampling_params.prompt_logprobs
        scores = [_logprobs(token_id, wants) for token_id in request.prompt_token_ids[1:]] if is_first else []
        return EngineCoreOutput(
            request_id=request.request_id,
            sequences=sequences,
            prompt_logprobs=[score for score in scores if score is not None],
            num_cached_tokens=0,
            first_scheduled_time_s=request.arrival_time_s,
            finished=self._forget_if_finished(request.request_id),
        )

    def _next(self, request: EngineCoreRequest, index: int) -> SequenceOutput:
        script = self._script(request, index)
        position = self._num_tokens[request.request_id, index]
        token_id = script[min(position, len(script) - 1)]
        self._num_tokens[request.request_id, index] += 1
        params = request.sampling_params
        finish_reason, stop_reason = None, None
        if token_id in request.eos_token_ids and not params.ignore_eos:
            finish_reason = "stop"
        elif token_id in (params.stop_token_ids or ()):
            finish_reason, stop_reason = "stop", token_id
        elif position + 1 == request.max_tokens:
            finish_reason = "length"
        if finish_reason is not None:
            del self._num_tokens[request.request_id, index]
        return SequenceOutput(
            index, [SampledToken(token_id, _logprobs(token_id, params.logprobs))], finish_reason, stop_reason
        )

    def _forget_if_finished(self, request_id: str) -> bool:
        if any(name == request_id for name, _ in self._num_tokens):
            return False
        self._live.pop(request_id, None)
        return True


def _logprobs(token_id: int, num_top: int | None) -> TokenLogprobs | None:
    """Token i has log probability -0.5; the likeliest tokens are 65, 66, ... at -0.25 each."""
    if num_top is None:
        return None
    return TokenLogprobs(-0.5, 7, list(range(65, 65 + num_top)), [-0.25] * num_top)
