"""POST /tokenize and /detokenize: the model's tokenizer for those who count, off the event loop."""

from starlette.responses import Response

from jaxllm.entrypoints.openai.chat_prompts import render_prompt
from jaxllm.entrypoints.openai.protocol import DetokenizeRequest, TokenizeRequest
from jaxllm.entrypoints.openai.responses import json_response
from jaxllm.entrypoints.openai.serving_engine import ServingEngine
from jaxllm.exceptions import InvalidRequestError
from jaxllm.tokenizer.tokenizer import Tokenizer


class TokenService:
    """Turns text into token ids and back."""

    def __init__(self, serving: ServingEngine) -> None:
        self._serving = serving

    async def tokenize(self, request: TokenizeRequest) -> Response:
        """Returns a text's tokens, or a conversation's.

        Raises:
          ApiError, InvalidRequestError: The request can't be answered.
        """
        self._serving.check_ready()
        self._serving.model_of(request.model)
        engine = self._serving.engine
        ids = await self._token_ids(request)
        answer = {
            "count": len(ids),
            "max_model_len": engine.config.scheduler.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        if request.return_token_strs:
            answer["token_strs"] = await engine.offload(len(ids), _token_texts, engine.tokenizer, ids)
        return json_response(answer)

    async def detokenize(self, request: DetokenizeRequest) -> Response:
        """Returns the tokens' text, special tokens included.

        Raises:
          ApiError: The request can't be answered.
        """
        self._serving.check_ready()
        self._serving.model_of(request.model)
        text = await self._serving.engine.decode(request.tokens, skip_special_tokens=False)
        return json_response({"prompt": text})

    async def _token_ids(self, request: TokenizeRequest) -> list[int]:
        engine = self._serving.engine
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequestError("give either prompt or messages", "prompt")
        if request.messages is None:
            assert request.prompt is not None
            return await engine.encode(request.prompt, request.add_special_tokens is not False)
        if request.add_special_tokens:
            raise InvalidRequestError("add_special_tokens must be false with messages", "add_special_tokens")
        prompt = await render_prompt(engine, request.messages, request.add_generation_prompt is not False)
        return prompt["prompt_token_ids"]


def _token_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids]
