"""POST /v1/chat/completions: a conversation in, the assistant's message out, whole or as a stream."""

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from jaxllm.engine.input_processor import TokensPrompt
from jaxllm.entrypoints.openai.answer_parts import (
    Delta,
    SequenceCursor,
    chat_logprobs,
    prompt_logprobs,
    running_usage,
    usage,
)
from jaxllm.entrypoints.openai.chat_prompts import render_prompt
from jaxllm.entrypoints.openai.protocol import ChatCompletionRequest
from jaxllm.entrypoints.openai.responses import json_response
from jaxllm.entrypoints.openai.sampling import chat_params
from jaxllm.entrypoints.openai.serving_engine import IndexedOutput, ServingEngine, answer_id
from jaxllm.entrypoints.openai.sse import EventStream, event
from jaxllm.outputs import CompletionOutput, RequestOutput


class ChatService:
    """Answers chat requests."""

    def __init__(self, serving: ServingEngine) -> None:
        self._serving = serving

    async def create(self, request: ChatCompletionRequest) -> Response:
        """Returns the answer. It begins only when the engine has accepted the conversation.

        Raises:
          ApiError, InvalidRequestError, EngineDeadError: The request can't be answered.
        """
        serving = self._serving
        serving.check_ready()
        model = serving.model_of(request.model)
        params = chat_params(request, serving.sampling_defaults)
        serving.check_priority(request.priority)
        prompt = await render_prompt(serving.engine, request.messages, request.add_generation_prompt is not False)
        if request.cache_salt is not None:
            prompt = TokensPrompt(**prompt, cache_salt=request.cache_salt)
        run = serving.run([prompt], params, request.priority or 0, final_only=not request.stream)
        head = {"id": answer_id("chatcmpl"), "created": int(time.time()), "model": model}
        if request.stream:
            return await EventStream.open(_events(run, request, {**head, "object": "chat.completion.chunk"}, params.n))
        async with aclosing(run):
            output = [output async for _, output in run][-1]
        return json_response({**head, "object": "chat.completion", **_whole(request, output)})


def _whole(request: ChatCompletionRequest, output: RequestOutput) -> dict[str, Any]:
    choices = []
    for sequence in output.outputs:
        choice: dict[str, Any] = {
            "index": sequence.index,
            "message": {"role": "assistant", "content": sequence.text, "refusal": None},
            "logprobs": _logprobs(request, SequenceCursor().advance(sequence)),
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
        }
        if request.return_token_ids:
            choice["token_ids"] = sequence.token_ids
        choices.append(choice)
    answer: dict[str, Any] = {"choices": choices, "usage": usage([output])}
    if request.return_token_ids:
        answer["prompt_token_ids"] = output.prompt_token_ids
    if request.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    return answer


async def _events(
    run: AsyncGenerator[IndexedOutput, None], request: ChatCompletionRequest, head: dict[str, Any], n: int
) -> AsyncGenerator[bytes, None]:
    stream = _ChatStream(request, n)
    output: RequestOutput | None = None
    async with aclosing(run):
        async for _, output in run:
            data = b"".join(event({**head, **chunk}) for chunk in stream.chunks(output))
            if data:
                yield data
    options = request.stream_options
    if output is not None and options is not None and options.include_usage:
        yield event({**head, "choices": [], "usage": usage([output])})


class _ChatStream:
    """One answer's chunks: each choice's role, its text as it comes, its end."""

    def __init__(self, request: ChatCompletionRequest, n: int) -> None:
        self._request = request
        self._cursors = [SequenceCursor() for _ in range(n)]
        self._is_begun = False
        options = request.stream_options
        self._has_running_usage = options is not None and bool(options.continuous_usage_stats)

    def chunks(self, output: RequestOutput) -> Iterable[dict[str, Any]]:
        """Yields what is new."""
        if not self._is_begun:
            self._is_begun = True
            for sequence in output.outputs:
                yield self._begin(output, sequence)
        for sequence in output.outputs:
            cursor = self._cursors[sequence.index]
            if cursor.is_finished:
                continue
            delta = cursor.advance(sequence)
            if self._is_worth_sending(delta, sequence):
                yield self._chunk(output, sequence, {"content": delta.text}, self._extras(delta))
            if sequence.finished:
                cursor.is_finished = True
                end = {"finish_reason": sequence.finish_reason, "stop_reason": sequence.stop_reason}
                yield self._chunk(output, sequence, {}, end)

    def _begin(self, output: RequestOutput, sequence: CompletionOutput) -> dict[str, Any]:
        chunk = self._chunk(output, sequence, {"role": "assistant", "content": ""}, {})
        if self._request.return_token_ids:
            chunk["prompt_token_ids"] = output.prompt_token_ids
        return chunk

    def _is_worth_sending(self, delta: Delta, sequence: CompletionOutput) -> bool:
        """Whether there is anything to show. A token whose text is held back is; the end's own chunk needs no other."""
        if delta.text or not delta.token_ids:
            return bool(delta.text)
        return not sequence.finished or bool(self._request.logprobs or self._request.return_token_ids)

    def _extras(self, delta: Delta) -> dict[str, Any]:
        extras: dict[str, Any] = {"logprobs": _logprobs(self._request, delta)}
        if self._request.return_token_ids:
            extras["token_ids"] = delta.token_ids
        return extras

    def _chunk(
        self, output: RequestOutput, sequence: CompletionOutput, delta: dict[str, Any], more: dict[str, Any]
    ) -> dict[str, Any]:
        choice = {"index": sequence.index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        chunk: dict[str, Any] = {"choices": [choice]}
        if self._has_running_usage:
            chunk["usage"] = running_usage(len(output.prompt_token_ids), len(sequence.token_ids))
        return chunk


def _logprobs(request: ChatCompletionRequest, delta: Delta) -> dict[str, Any] | None:
    if not request.logprobs:
        return None
    return chat_logprobs(delta.token_ids, delta.logprobs, request.top_logprobs or 0)
