"""POST /v1/completions: prompts in, text out, whole or as a stream. Knows bodies and answers, no HTTP."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from jaxllm.engine.input_processor import Prompt
from jaxllm.entrypoints.openai.answer_parts import CompletionLogprobs, SequenceCursor, prompt_logprobs, usage
from jaxllm.entrypoints.openai.protocol import CompletionRequest
from jaxllm.entrypoints.openai.responses import json_response
from jaxllm.entrypoints.openai.sampling import completion_params
from jaxllm.entrypoints.openai.serving_engine import MAX_PROMPTS, IndexedOutput, ServingEngine, answer_id
from jaxllm.entrypoints.openai.sse import EventStream, event
from jaxllm.exceptions import InvalidRequestError
from jaxllm.outputs import CompletionOutput, RequestOutput
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
        salt = {} if request.cache_salt is None else {"cache_salt": request.cache_salt}
        if not isinstance(prompt, str):
            return {"prompt_token_ids": prompt, **salt}
        if request.add_special_tokens is not False:
            return {"prompt": prompt, **salt}
        tokenizer = self._serving.engine.tokenizer
        ids = await asyncio.to_thread(tokenizer.encode, prompt, add_special_tokens=False)
        return {"prompt": prompt, "prompt_token_ids": ids, **salt}


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

    def usage(self, outputs: Any) -> dict[str, Any]:
        return usage(outputs, self._hides_tokens)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = []
        for prompt_index, output in enumerate(outputs):
            for sequence in output.outputs:
                choice = self._choices[prompt_index * self._n + sequence.index]
                content = self._content(choice, output, sequence)
                choices.append(
                    {
                        "index": prompt_index * self._n + sequence.index,
                        **content,
                        "finish_reason": sequence.finish_reason,
                        "stop_reason": sequence.stop_reason,
                    }
                )
                if self._request.prompt_logprobs is not None:
                    choices[-1]["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return {"choices": choices, "usage": self.usage(outputs)}

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Returns what is new in one prompt's output: text as it comes, each sequence's end in a chunk of its own."""
        if self._waits_for_prompt(output):
            return []
        found = []
        for sequence in output.outputs:
            index = prompt_index * self._n + sequence.index
            choice = self._choices[index]
            if choice.cursor.is_finished:
                continue
            content = self._content(choice, output, sequence)
            is_worth_sending = choice.has_news or content["text"]
            if is_worth_sending:
                found.append(self._chunk(output, sequence, {"index": index, **content, "finish_reason": None}))
            if sequence.finished:
                choice.cursor.is_finished = True
                end = {"index": index, "text": "", "logprobs": None, "finish_reason": sequence.finish_reason}
                found.append(self._chunk(output, sequence, {**end, "stop_reason": sequence.stop_reason}))
        return found

    def _chunk(self, output: RequestOutput, sequence: CompletionOutput, choice: dict[str, Any]) -> dict[str, Any]:
        chunk: dict[str, Any] = {"choices": [choice]}
        if self._has_running_usage:
            num_tokens = 0 if self._hides_tokens else len(sequence.token_ids)
            num_prompt = len(output.prompt_token_ids)
            chunk["usage"] = {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_tokens,
                "total_tokens": num_prompt + num_tokens,
            }
        return chunk

    def _waits_for_prompt(self, output: RequestOutput) -> bool:
        """Whether an echo's log probabilities are still being computed."""
        scores = output.prompt_logprobs
        return scores is not None and len(scores) < len(output.prompt_token_ids) and not output.finished

    def _content(self, choice: "_Choice", output: RequestOutput, sequence: CompletionOutput) -> dict[str, Any]:
        """Returns a choice's new text, log probabilities and ids; with echo, its first ones are the prompt's."""
        request, prompt_ids = self._request, output.prompt_token_ids
        is_first, choice.is_begun = not choice.is_begun, True
        delta = choice.cursor.advance(sequence)
        text, ids, positions = delta.text, delta.token_ids, list(delta.logprobs)
        # The token that completes an end has no text; it makes no chunk unless something else is to be shown.
        choice.has_news = bool(ids) and (not sequence.finished or request.logprobs is not None)
        if self._hides_tokens:
            text, ids, positions, choice.has_news = "", [], [], False
        logprobs, content = None, {}
        shown_ids = ids
        if request.echo and is_first:
            choice.has_news = True
            text = self._prompt_text(output) + text
            if request.logprobs is not None:
                shown_ids, positions = [*prompt_ids, *ids], [*(output.prompt_logprobs or []), *positions]
        if request.logprobs is not None:
            first_text = self._tokenizer.decode(prompt_ids[:1], skip_special_tokens=False) if is_first else ""
            logprobs = choice.logprobs.take(shown_ids, positions, first_text)
        content = {"text": text, "logprobs": logprobs}
        if request.return_token_ids:
            choice.has_news = choice.has_news or bool(ids)
            content |= {"token_ids": ids, "prompt_token_ids": prompt_ids if is_first else None}
        return content

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._tokenizer.decode(output.prompt_token_ids, self._request.skip_special_tokens is not False)


class _Choice:
    """What one choice has sent."""

    __slots__ = ("cursor", "logprobs", "is_begun", "has_news")

    def __init__(self) -> None:
        self.cursor = SequenceCursor()
        self.logprobs = CompletionLogprobs()
        self.is_begun = False
        self.has_news = False


def _prompt_list(prompt: Any) -> list[str | list[int]]:
    """Returns a list of prompts: a text, a list of texts, a list of ids and a list of such lists are understood."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequestError("prompt must be a text, token ids, or a list of either that isn't empty", "prompt")
    if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(prompt)}", "prompt")
    if all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        return prompt
    raise InvalidRequestError("prompt must hold texts alone, or lists of token ids alone", "prompt")
