"""POST /v1/completions: prompts in, text out, whole or as a stream. Knows bodies and answers, no HTTP."""

import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from typing import Any, NamedTuple

from starlette.responses import Response

from jaxllm.engine.input_processor import Prompt, TextPrompt, TokensPrompt
from jaxllm.entrypoints.openai.answer_parts import (
    CompletionLogprobs,
    Delta,
    SequenceCursor,
    prompt_logprobs,
    running_usage,
    usage,
)
from jaxllm.entrypoints.openai.protocol import CompletionRequest
from jaxllm.entrypoints.openai.responses import json_response
from jaxllm.entrypoints.openai.sampling import completion_params
from jaxllm.entrypoints.openai.serving_engine import MAX_PROMPTS, IndexedOutput, ServingEngine, answer_id
from jaxllm.entrypoints.openai.sse import EventStream, event
from jaxllm.exceptions import InvalidRequestError
from jaxllm.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from jaxllm.tokenizer.tokenizer import Tokenizer


class CompletionService:
    """Answers completion requests."""

    def __init__(self, serving: ServingEngine) -> None:
        self._serving = serving

    async def create(self, request: CompletionRequest) -> Response:
        """Returns the answer. It begins only when the engine has accepted every prompt.

        Raises:
          ApiError, InvalidRequestError, EngineDeadError: The request can't be answered.
        """
        serving = self._serving
        serving.check_ready()
        model = serving.model_of(request.model)
        params = completion_params(request, serving.sampling_defaults)
        serving.check_priority(request.priority)
        prompts = [await self._prompt(prompt, request) for prompt in _prompt_list(request.prompt)]
        run = serving.run(prompts, params, request.priority or 0, final_only=not request.stream)
        answer = _Answer(request, serving.engine.tokenizer, params.n, len(prompts))
        head = {"id": answer_id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": model}
        if request.stream:
            return await EventStream.open(_events(run, answer, head))
        async with aclosing(run):
            finals = {index: output async for index, output in run}
        outputs = [finals[index] for index in range(len(prompts))]
        return json_response({**head, **answer.whole(outputs)})

    async def _prompt(self, prompt: str | list[int], request: CompletionRequest) -> Prompt:
        made: TextPrompt | TokensPrompt
        if not isinstance(prompt, str):
            made = {"prompt_token_ids": prompt}
        elif request.add_special_tokens is False:
            ids = await self._serving.engine.encode(prompt, add_special_tokens=False)
            made = {"prompt": prompt, "prompt_token_ids": ids}
        else:
            made = {"prompt": prompt}
        if request.cache_salt is not None:
            made["cache_salt"] = request.cache_salt
        return made


async def _events(
    run: AsyncGenerator[IndexedOutput, None], answer: "_Answer", head: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    latest: dict[int, RequestOutput] = {}
    async with aclosing(run):
        async for index, output in run:
            latest[index] = output
            data = b"".join(event({**head, **chunk}) for chunk in answer.chunks(index, output))
            if data:
                yield data
    if answer.includes_usage:
        yield event({**head, "choices": [], "usage": answer.usage(latest.values())})


class _Answer:
    """One request's answer, in one piece or in chunks."""

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer, n: int, num_prompts: int) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._n = n
        self._hides_tokens = request.max_tokens == 0
        self._choices = [_Choice() for _ in range(n * num_prompts)]
        options = request.stream_options
        self.includes_usage = options is not None and bool(options.include_usage)
        self._has_running_usage = options is not None and bool(options.continuous_usage_stats)

    def usage(self, outputs: Iterable[RequestOutput]) -> dict[str, Any]:
        return usage(outputs, self._hides_tokens)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Returns all choices of finished outputs, one a prompt, and the usage."""
        choices = []
        for prompt_index, output in enumerate(outputs):
            for sequence in output.outputs:
                index = prompt_index * self._n + sequence.index
                content = self._news(self._choices[index], output, sequence).content
                end = {"finish_reason": sequence.finish_reason, "stop_reason": sequence.stop_reason}
                choices.append({"index": index, **content, **end})
                if self._request.prompt_logprobs is not None:
                    choices[-1]["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return {"choices": choices, "usage": self.usage(outputs)}

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Yields what is new in one prompt's output: text as it comes, each sequence's end in a chunk of its own."""
        scores = output.prompt_logprobs
        if scores is not None and len(scores) < len(output.prompt_token_ids) and not output.finished:
            return  # an echo's log probabilities are still being computed
        for sequence in output.outputs:
            index = prompt_index * self._n + sequence.index
            choice = self._choices[index]
            if choice.cursor.is_finished:
                continue
            news = self._news(choice, output, sequence)
            if news.is_worth_sending:
                yield self._chunk(output, sequence, {"index": index, **news.content, "finish_reason": None})
            if sequence.finished:
                choice.cursor.is_finished = True
                end = {"finish_reason": sequence.finish_reason, "stop_reason": sequence.stop_reason}
                yield self._chunk(output, sequence, {"index": index, "text": "", "logprobs": None, **end})

    def _chunk(self, output: RequestOutput, sequence: CompletionOutput, choice: dict[str, Any]) -> dict[str, Any]:
        chunk: dict[str, Any] = {"choices": [choice]}
        if self._has_running_usage:
            num_tokens = 0 if self._hides_tokens else len(sequence.token_ids)
            chunk["usage"] = running_usage(len(output.prompt_token_ids), num_tokens)
        return chunk

    def _news(self, choice: "_Choice", output: RequestOutput, sequence: CompletionOutput) -> "_News":
        """Returns a choice's new text, log probabilities and ids; with echo, the first ones are the prompt's."""
        request = self._request
        is_first, choice.is_begun = not choice.is_begun, True
        delta = choice.cursor.advance(sequence)
        if self._hides_tokens:
            delta = Delta("", [], [])
        text, shown_ids, positions = delta.text, delta.token_ids, list[PositionLogprobs | None](delta.logprobs)
        if request.echo and is_first:
            text = self._prompt_text(output) + text
            shown_ids = [*output.prompt_token_ids, *shown_ids]
            positions = [*(output.prompt_logprobs or []), *positions]
        content: dict[str, Any] = {"text": text, "logprobs": None}
        if request.logprobs is not None:
            first_text = self._token_text(output.prompt_token_ids[0]) if is_first else ""
            content["logprobs"] = choice.logprobs.take(shown_ids, positions, first_text)
        if request.return_token_ids:
            content["token_ids"] = delta.token_ids
            content["prompt_token_ids"] = output.prompt_token_ids if is_first else None
        return _News(content, self._is_worth_sending(text, delta, sequence))

    def _is_worth_sending(self, text: str, delta: Delta, sequence: CompletionOutput) -> bool:
        """Whether there is anything to show. A token whose text is held back is; the end's own chunk needs no other."""
        if text or not delta.token_ids:
            return bool(text)
        return not sequence.finished or self._request.logprobs is not None or bool(self._request.return_token_ids)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._tokenizer.decode(output.prompt_token_ids, self._request.skip_special_tokens is not False)

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


class _News(NamedTuple):
    content: dict[str, Any]  # of a choice
    is_worth_sending: bool


class _Choice:
    """What one choice has sent."""

    __slots__ = ("cursor", "logprobs", "is_begun")

    def __init__(self) -> None:
        self.cursor = SequenceCursor()
        self.logprobs = CompletionLogprobs()
        self.is_begun = False


def _prompt_list(prompt: Any) -> list[str | list[int]]:
    """Returns a list of prompts: a text, a list of texts, a list of ids and a list of such lists are understood."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequestError("prompt must be a text, token ids, or a list of either that isn't empty", "prompt")
    kinds = set(map(type, prompt))  # there may be millions of ids
    if kinds == {int}:
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(prompt)}", "prompt")
    if kinds in ({str}, {list}):
        return prompt
    raise InvalidRequestError("prompt must hold texts alone, or lists of token ids alone", "prompt")
