"""EngineCoreOutputs -> RequestOutputs: text, stop strings, logprobs, and a request's sequences put together.

Knows each live request by its id. Doesn't talk to the engine core: it names the sequences that a stop
string ended, and its caller passes that on.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxllm.engine.detokenizer import Detokenizer
from jaxllm.engine.logprobs import LogprobsBuilder
from jaxllm.engine.sequence_text import SequenceText
from jaxllm.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    SampledToken,
    SequenceOutput,
)
from jaxllm.outputs import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput
from jaxllm.tokenizer.tokenizer import Tokenizer


class ProcessedOutputs(NamedTuple):
    request_outputs: list[RequestOutput]
    stopped_sequences: list[tuple[str, int]]  # (core id, index) that the engine core still has to finish


class UpdatedRequest(NamedTuple):
    request_id: str
    final_output: RequestOutput | None  # once it has finished
    is_visible: bool  # whether its caller wants to see it before it has finished
    stopped: list[int]  # indices of sequences that the engine core still has to finish


class OutputProcessor:
    """Holds the state of the requests that have not finished.

    A request has two ids: the caller's `request_id`, free again once it has finished, and the engine core's, which
    no other request ever has.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._logprobs = LogprobsBuilder(tokenizer)
        self._requests: dict[str, _RequestState] = {}  # by core id
        self._core_ids: dict[str, str] = {}  # by request id

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._core_ids

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def core_id_of(self, request_id: str) -> str | None:
        """Returns the engine core's id of a live request, None for any other."""
        return self._core_ids.get(request_id)

    def add_request(
        self, request_id: str, request: EngineCoreRequest, prompt: str | None, final_only: bool = False
    ) -> None:
        """Registers a request. Call it before the engine core can answer.

        Args:
          request_id: The caller's id.
          request: As the engine core gets it.
          prompt: Its text, if known.
          final_only: Whether only the finished output is wanted. Each output before it copies all tokens so far.
        """
        assert request.request_id not in self._requests and request_id not in self._core_ids
        state = _RequestState(request_id, request, prompt, final_only, self._tokenizer, self._logprobs)
        self._requests[request.request_id] = state
        self._core_ids[request_id] = request.request_id

    def remove_request(self, request_id: str) -> None:
        """Forgets a request, whatever it has got so far. Unknown ids are ignored."""
        core_id = self._core_ids.pop(request_id, None)
        if core_id is not None:
            del self._requests[core_id]

    def remove_core_request(self, core_id: str) -> str | None:
        """Forgets a request that the engine core gave up, and returns the caller's id of it, if it was known."""
        state = self._requests.get(core_id)
        if state is None:
            return None
        self.remove_request(state.request_id)
        return state.request_id

    def abort_requests(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Ends requests and returns their last outputs, finish_reason "abort". Unknown ids are ignored."""
        outputs = []
        for request_id in request_ids:
            core_id = self._core_ids.get(request_id)
            if core_id is not None:
                state = self._requests[core_id]
                self.remove_request(request_id)
                state.abort(time.monotonic())
                outputs.append(state.to_request_output())
        return outputs

    def process_outputs(self, outputs: EngineCoreOutputs) -> ProcessedOutputs:
        """Takes one step's news and returns the requests that it changed, each with all it has so far.

        Of requests that were added with final_only, only those that have finished are among them.
        """
        now_s = time.monotonic()
        request_outputs = []
        stopped: list[tuple[str, int]] = []
        for news in outputs.outputs:
            updated = self.process_output(news, now_s)
            if updated is None:
                continue
            stopped += [(news.request_id, index) for index in updated.stopped]
            if updated.final_output is not None:
                request_outputs.append(updated.final_output)
            elif updated.is_visible:
                request_outputs.append(self.snapshot(updated.request_id))
        return ProcessedOutputs(request_outputs, stopped)

    def process_output(self, news: EngineCoreOutput, now_s: float) -> UpdatedRequest | None:
        """Takes one request's news. Returns None for a request that was aborted while the step ran."""
        state = self._requests.get(news.request_id)
        if state is None:
            return None
        stopped = state.update(news, now_s)
        if not state.is_finished:
            return UpdatedRequest(state.request_id, None, not state.final_only, stopped)
        output = state.to_request_output()
        self.remove_request(state.request_id)
        return UpdatedRequest(state.request_id, output, True, stopped)

    def snapshot(self, request_id: str) -> RequestOutput:
        """Returns what a live request has so far; later steps don't change it."""
        return self._requests[self._core_ids[request_id]].to_request_output()


class _RequestState:
    """One request: its prompt, its n sequences and its times."""

    __slots__ = (
        "request_id",
        "final_only",
        "_request",
        "_prompt",
        "_sequences",
        "_logprobs",
        "_prompt_logprobs",
        "_metrics",
    )

    def __init__(
        self,
        request_id: str,
        request: EngineCoreRequest,
        prompt: str | None,
        final_only: bool,
        tokenizer: Tokenizer,
        logprobs: LogprobsBuilder,
    ) -> None:
        params = request.sampling_params
        self.request_id = request_id
        self.final_only = final_only
        self._request = request
        self._prompt = prompt
        self._sequences = [_new_sequence(request, index, tokenizer, logprobs) for index in range(params.n)]
        self._logprobs = logprobs
        # The first token has nothing before it that could predict it.
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self._metrics = RequestMetrics(arrival_time_s=request.arrival_time_s)

    @property
    def is_finished(self) -> bool:
        return all(sequence.output.finished for sequence in self._sequences)

    def update(self, news: EngineCoreOutput, now_s: float) -> list[int]:
        """Takes one step's news; returns the indices of sequences that ended here and not yet in the core."""
        self._add_prompt_logprobs(news)
        self._metrics.first_scheduled_time_s = news.first_scheduled_time_s
        self._metrics.num_cached_tokens = news.num_cached_tokens
        stopped = []
        for sequence_news in news.sequences:
            sequence = self._sequences[sequence_news.index]
            if sequence.output.finished:
                continue  # the core had not heard of the stop string yet
            if sequence_news.new_tokens and self._metrics.first_token_time_s is None:
                self._metrics.first_token_time_s = now_s
            if sequence.update(sequence_news) and sequence_news.finish_reason is None:
                stopped.append(sequence_news.index)
            if sequence_news.cumulative_logprob is not None:
                sequence.output.cumulative_logprob = sequence_news.cumulative_logprob
        if news.finished and self._request.sampling_params.use_beam_search:
            del self._sequences[len(news.sequences) :]  # a tiny vocabulary may not have n sequences
        if news.finished:
            self.abort(now_s)  # changes nothing where every sequence has said why it finished
        if self.is_finished:
            self._metrics.finished_time_s = now_s
        return stopped

    def abort(self, now_s: float) -> None:
        for sequence in self._sequences:
            if not sequence.output.finished:
                sequence.finish("abort", None)
        self._metrics.finished_time_s = now_s

    def to_request_output(self) -> RequestOutput:
        """Returns a snapshot: later steps don't change it."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._request.prompt_token_ids,
            prompt_logprobs=None if self._prompt_logprobs is None else list(self._prompt_logprobs),
            outputs=[sequence.snapshot() for sequence in self._sequences],
            finished=self.is_finished,
            metrics=replace(self._metrics),
        )

    def _add_prompt_logprobs(self, news: EngineCoreOutput) -> None:
        if self._prompt_logprobs is None:
            return
        prompt = self._request.prompt_token_ids
        for entry in news.prompt_logprobs:
            position = len(self._prompt_logprobs)
            context = prompt[max(0, position - 4) : position]
            self._prompt_logprobs.append(self._logprobs.build(prompt[position], entry, context))


@dataclass(slots=True, eq=False)
class _SequenceState:
    """One sequence's output, and what grows it. `text` is None where no text was asked for."""

    output: CompletionOutput
    text: SequenceText | None
    logprobs: LogprobsBuilder
    prompt_tail: list[int]  # the prompt's last tokens: context for the first logprobs
    shows_stop_token: bool

    def update(self, news: SequenceOutput) -> bool:
        """Takes over a finish reason, and the new tokens up to the one that completes a stop string.

        Returns:
          Whether the sequence has finished.
        """
        for position, token in enumerate(news.new_tokens):
            is_stop_token = news.finish_reason == "stop" and position == len(news.new_tokens) - 1
            self._append(token)
            if self.text is None or (is_stop_token and not self.shows_stop_token):
                continue
            stop = self.text.append(token.token_id)
            if stop is not None:
                self.output.finish_reason, self.output.stop_reason = "stop", stop
                return True
        if news.finish_reason is not None:
            self.finish(news.finish_reason, news.stop_reason)
        return self.output.finished

    def finish(self, finish_reason: str, stop_reason: int | str | None) -> None:
        """Ends the sequence; a stop string in the text released last goes before the reason given."""
        stop = None if self.text is None else self.text.finish()
        if stop is not None:
            finish_reason, stop_reason = "stop", stop
        self.output.finish_reason, self.output.stop_reason = finish_reason, stop_reason

    def snapshot(self) -> CompletionOutput:
        output = self.output
        return replace(
            output,
            text="" if self.text is None else self.text.visible,
            token_ids=list(output.token_ids),
            logprobs=None if output.logprobs is None else list(output.logprobs),
        )

    def _append(self, token: SampledToken) -> None:
        output = self.output
        if output.logprobs is not None and token.logprobs is not None:
            context = [*self.prompt_tail, *output.token_ids[-4:]]
            position = self.logprobs.build(token.token_id, token.logprobs, context)
            output.logprobs.append(position)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + position[token.token_id].logprob
        output.token_ids.append(token.token_id)


def _new_sequence(
    request: EngineCoreRequest, index: int, tokenizer: Tokenizer, logprobs: LogprobsBuilder
) -> _SequenceState:
    params = request.sampling_params
    output = CompletionOutput(index=index)
    if params.logprobs is not None:
        output.logprobs, output.cumulative_logprob = [], 0.0
    text = None
    if params.detokenize:
        detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens)
        text = SequenceText(detokenizer, params.stop_strings, params.include_stop_str_in_output, params.min_tokens)
    tail = request.prompt_token_ids[-4:]
    return _SequenceState(output, text, logprobs, tail, params.include_stop_str_in_output)
