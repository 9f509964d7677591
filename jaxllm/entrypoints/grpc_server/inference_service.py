"""jaxllm.v1.Inference: text, chat and tokens for people and scripts. protos/jaxllm.proto says what each method does."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

import jaxllm
from jaxllm.engine.input_processor import Prompt, TokensPrompt
from jaxllm.entrypoints.grpc_server import convert, descriptors
from jaxllm.entrypoints.grpc_server.deltas import Deltas, News
from jaxllm.entrypoints.grpc_server.engine_door import EngineDoor, new_request_id
from jaxllm.entrypoints.grpc_server.rpc import Method
from jaxllm.entrypoints.offline_runner import chat_prompt
from jaxllm.exceptions import InvalidRequestError
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams

_message_class = descriptors.message_class
_GenerateResponse = _message_class("jaxllm.v1.GenerateResponse")
_ChatResponse = _message_class("jaxllm.v1.ChatResponse")
_TokenizeResponse = _message_class("jaxllm.v1.TokenizeResponse")
_DetokenizeResponse = _message_class("jaxllm.v1.DetokenizeResponse")
_Model = _message_class("jaxllm.v1.Model")
_ListModelsResponse = _message_class("jaxllm.v1.ListModelsResponse")
_AbortResponse = _message_class("jaxllm.v1.AbortResponse")
_GetStatusResponse = _message_class("jaxllm.v1.GetStatusResponse")


class InferenceService:
    """The methods of jaxllm.v1.Inference on one engine."""

    def __init__(self, door: EngineDoor) -> None:
        self._door = door
        self._created = int(time.time())

    @property
    def methods(self) -> dict[str, Method]:
        return {
            "Generate": self.generate,
            "GenerateStream": self.generate_stream,
            "Chat": self.chat,
            "ChatStream": self.chat_stream,
            "Tokenize": self.tokenize,
            "Detokenize": self.detokenize,
            "ListModels": self.list_models,
            "Abort": self.abort,
            "GetStatus": self.get_status,
        }

    async def generate(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return await _last(self.generate_stream(request, context, final_only=True))

    async def generate_stream(
        self, request: Any, context: grpc.aio.ServicerContext, final_only: bool = False
    ) -> AsyncGenerator[Any, None]:
        self._check(request)
        params = convert.to_sampling_params(request.sampling_params, self._door.sampling_defaults)
        prompt = convert.to_prompt(request)
        name = new_request_id(request, context)
        prompt_logprobs_of = convert.to_prompt_logprobs  # of the first reply; then nothing
        async with aclosing(self._run(request, prompt, params, name, final_only)) as pieces:
            async for output, news in pieces:
                yield _GenerateResponse(
                    request_id=name,
                    model=self._door.model_name,
                    completions=[convert.to_completion(part, params.logprobs) for part, _ in news],
                    usage=convert.to_usage(output) if output.finished else None,
                    prompt_logprobs=prompt_logprobs_of(output, params.prompt_logprobs),
                )
                prompt_logprobs_of = _nothing

    async def chat(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return await _last(self.chat_stream(request, context, final_only=True))

    async def chat_stream(
        self, request: Any, context: grpc.aio.ServicerContext, final_only: bool = False
    ) -> AsyncGenerator[Any, None]:
        self._check(request)
        params = convert.to_sampling_params(
            request.sampling_params, {"max_tokens": None, **self._door.sampling_defaults}
        )
        if params.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs can be had of Generate only", "prompt_logprobs")
        prompt = await self._chat_prompt(request)
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        name = new_request_id(request, context)
        async with aclosing(self._run(request, prompt, params, name, final_only)) as pieces:
            async for output, news in pieces:
                yield _ChatResponse(
                    request_id=name,
                    model=self._door.model_name,
                    choices=[convert.to_choice(part, params.logprobs, has_role=is_first) for part, is_first in news],
                    usage=convert.to_usage(output) if output.finished else None,
                )

    async def tokenize(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        self._check(request)
        if bool(request.text) == bool(request.messages):
            raise InvalidRequestError("give text or messages, one of the two", "text")
        if request.messages:
            if request.add_special_tokens:
                raise InvalidRequestError(
                    "add_special_tokens must be false with messages: the chat template writes them",
                    "add_special_tokens",
                )
            prompt = await self._chat_prompt(request)
            token_ids = prompt["prompt_token_ids"]
        else:
            adds = request.add_special_tokens if request.HasField("add_special_tokens") else True
            token_ids = await self._door.engine.encode(request.text, adds)
        max_model_len = self._door.engine.config.scheduler.max_model_len
        return _TokenizeResponse(token_ids=token_ids, max_model_len=max_model_len)

    async def detokenize(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        self._check(request)
        text = await self._door.engine.decode(list(request.token_ids), request.skip_special_tokens)
        return _DetokenizeResponse(text=text)

    async def list_models(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        door = self._door
        max_model_len = door.engine.config.scheduler.max_model_len if door.is_ready else 0
        models = [
            _Model(id=name, root=door.settings.model, max_model_len=max_model_len, created=self._created)
            for name in door.settings.served_model_names
        ]
        return _ListModelsResponse(models=models)

    async def abort(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return _AbortResponse(aborted_request_ids=await self._door.abort(request.request_ids))

    async def get_status(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        engine = self._door.engine
        status, stats, infos = engine.status(), engine.stats, engine.kv_cache_infos
        reply = _GetStatusResponse(
            phase=status.phase,
            percent=status.percent,
            eta_s=status.eta_s,
            detail=status.detail,
            version=jaxllm.__version__,
            model=self._door.model_name,
            uptime_s=self._door.uptime_s,
        )
        if infos is not None:
            num_blocks = sum(info.num_device_blocks - 1 for info in infos)  # block 0 is nobody's
            reply.num_blocks = reply.num_free_blocks = num_blocks
        if stats is not None and engine.num_unfinished_requests:  # they are of the latest step, which may be long ago
            reply.num_running, reply.num_waiting = stats.num_running, stats.num_waiting
            reply.num_free_blocks = stats.num_free_blocks
        return reply

    def _check(self, request: Any) -> None:
        self._door.check_model(request.model)
        self._door.check_ready()

    async def _chat_prompt(self, request: Any) -> TokensPrompt:
        """Renders and tokenizes the request's messages."""
        messages = convert.to_messages(request.messages)
        adds = request.add_generation_prompt if request.HasField("add_generation_prompt") else True
        engine, size = self._door.engine, sum(len(message["content"]) for message in messages)
        return await engine.offload(size, chat_prompt, engine.tokenizer, messages, adds)

    async def _run(
        self, request: Any, prompt: Prompt, params: SamplingParams, name: str, final_only: bool
    ) -> AsyncGenerator[tuple[RequestOutput, list[News]], None]:
        """Yields each output that has news, with the news."""
        deltas = Deltas()
        outputs = self._door.generate(prompt, params, name, priority=request.priority, final_only=final_only)
        async with aclosing(outputs):
            async for output in outputs:
                news = deltas.take(output)
                if news or output.finished:
                    yield output, news


async def _last(replies: AsyncGenerator[Any, None]) -> Any:
    """Returns the only reply."""
    async with aclosing(replies):
        async for reply in replies:
            last = reply
    return last


def _nothing(output: RequestOutput, num_top: int | None) -> list[Any]:
    return []
