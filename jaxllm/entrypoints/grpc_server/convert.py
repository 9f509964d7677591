"""jaxllm.v1 messages <-> the engine's types. Knows no engine and no call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.engine.input_processor import Prompt, TextPrompt, TokensPrompt
from jaxllm.entrypoints.grpc_server import descriptors
from jaxllm.exceptions import InvalidRequestError
from jaxllm.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from jaxllm.sampling_params import SamplingParams

MAX_MESSAGES = 4096
# What is many in a message -> what SamplingParams wants.
_PLAIN: dict[str, Callable[[Any], Any]] = {
    "stop": list,
    "stop_token_ids": list,
    "logit_bias": dict,
    "allowed_token_ids": list,
    "bad_words": list,
}
_Completion = descriptors.message_class("jaxllm.v1.Completion")
_ChatChoice = descriptors.message_class("jaxllm.v1.ChatChoice")
_PositionLogprobs = descriptors.message_class("jaxllm.v1.PositionLogprobs")
_TokenLogprob = descriptors.message_class("jaxllm.v1.TokenLogprob")
_Usage = descriptors.message_class("jaxllm.v1.Usage")


def to_sampling_params(message: Any, defaults: Mapping[str, Any]) -> SamplingParams:
    """Returns what a jaxllm.v1.SamplingParams says.

    Args:
      message: The message. Zeros and absent fields ask for the default, as the comments in jaxllm.proto tell.
      defaults: The defaults that aren't SamplingParams' own.

    Raises:
      InvalidRequestError: A field breaks its rule.
    """
    return SamplingParams(**{**defaults, **present_fields(message)})


def present_fields(message: Any) -> dict[str, Any]:
    """Returns what stands in a message of sampling parameters; zeros stand in optional fields only."""
    return {field.name: _PLAIN.get(field.name, _same)(value) for field, value in message.ListFields()}


def to_prompt(request: Any) -> Prompt:
    """Returns the prompt of a jaxllm.v1.GenerateRequest.

    Raises:
      InvalidRequestError: It has none.
    """
    prompt: TextPrompt | TokensPrompt
    match request.WhichOneof("prompt"):
        case "text":
            prompt = {"prompt": request.text}
        case "token_ids":
            prompt = {"prompt_token_ids": list(request.token_ids.ids)}
        case _:
            raise InvalidRequestError("a request needs a prompt: set text or token_ids", "prompt")
    if request.cache_salt:
        prompt["cache_salt"] = request.cache_salt
    return prompt


def to_messages(messages: Sequence[Any]) -> list[dict[str, str]]:
    """Returns jaxllm.v1.ChatMessages as the chat template takes them.

    Raises:
      InvalidRequestError: There are too many.
    """
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(f"messages may be at most {MAX_MESSAGES}, got {len(messages)}", "messages")
    return [{"role": message.role, "content": message.content} for message in messages]


def to_completion(completion: CompletionOutput, num_logprobs: int | None) -> Any:
    """Returns a jaxllm.v1.Completion."""
    return _Completion(text=completion.text, **_common_fields(completion, num_logprobs))


def to_choice(completion: CompletionOutput, num_logprobs: int | None, has_role: bool) -> Any:
    """Returns a jaxllm.v1.ChatChoice."""
    message = {"role": "assistant" if has_role else "", "content": completion.text}
    return _ChatChoice(message=message, **_common_fields(completion, num_logprobs))


def to_usage(output: RequestOutput) -> Any:
    """Returns a jaxllm.v1.Usage."""
    return _Usage(
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=sum(len(completion.token_ids) for completion in output.outputs),
        cached_tokens=output.num_cached_tokens,
    )


def to_prompt_logprobs(output: RequestOutput, num_top: int | None) -> list[Any]:
    """Returns one jaxllm.v1.PositionLogprobs a prompt token; nothing if they weren't asked for."""
    if output.prompt_logprobs is None or num_top is None:
        return []
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return [to_position_logprobs(token_id, position, num_top) for token_id, position in pairs]


def to_position_logprobs(token_id: int, position: PositionLogprobs | None, num_top: int) -> Any:
    """Returns a jaxllm.v1.PositionLogprobs; an empty one for a position without probabilities.

    Args:
      token_id: The token that stands there.
      position: Its probability and those of the most likely tokens.
      num_top: How many of the most likely tokens to list.
    """
    if position is None:
        return _PositionLogprobs()
    top = most_likely(position, num_top)
    return _PositionLogprobs(
        chosen=_to_token_logprob(token_id, position[token_id]),
        top=[_to_token_logprob(top_id, logprob) for top_id, logprob in top],
    )


def most_likely(position: PositionLogprobs, num_top: int) -> list[tuple[int, Logprob]]:
    """Returns the most likely tokens of a position, most likely first."""
    return sorted(position.items(), key=lambda item: item[1].rank)[:num_top]


def _same(value: Any) -> Any:
    return value


def _common_fields(completion: CompletionOutput, num_logprobs: int | None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "index": completion.index,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason or "",
    }
    if isinstance(completion.stop_reason, str):
        fields["stop_string"] = completion.stop_reason
    elif completion.stop_reason is not None:
        fields["stop_token_id"] = completion.stop_reason
    if completion.logprobs is not None and num_logprobs is not None:
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        fields["logprobs"] = [to_position_logprobs(token_id, position, num_logprobs) for token_id, position in pairs]
    return fields


def _to_token_logprob(token_id: int, logprob: Logprob) -> Any:
    return _TokenLogprob(token_id=token_id, token=logprob.decoded_token, logprob=logprob.logprob, rank=logprob.rank)
