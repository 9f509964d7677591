"""A request's fields -> SamplingParams. Values are checked there; here they only find their names."""

from collections.abc import Mapping
from typing import Any

from jaxllm.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from jaxllm.exceptions import InvalidRequestError
from jaxllm.sampling_params import MAX_LOGIT_BIAS, SamplingParams

_SHARED = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
)
_COMPLETION = ("max_tokens", "logprobs", "best_of", "use_beam_search", "length_penalty", "early_stopping")


def completion_params(request: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Returns how a completion's tokens are chosen. A request for no tokens at all, with echo, generates one.

    Args:
      request: The request.
      defaults: Values of fields that it leaves out.

    Raises:
      InvalidRequestError: A field breaks its rule.
    """
    _check_stream(request)
    fields = _given(request, _SHARED + _COMPLETION)
    if request.echo:
        if request.max_tokens == 0:
            fields["max_tokens"] = 1
        if request.logprobs is not None:
            fields["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    if request.use_beam_search:
        if request.stream:
            raise InvalidRequestError("stream must be false with use_beam_search: beams end together", "stream")
        fields = {"temperature": 0.0, **fields}
    elif "temperature" not in fields and "temperature" not in defaults:
        fields["temperature"] = 1.0
    return SamplingParams(**{**({} if request.use_beam_search else defaults), **fields})


def chat_params(request: ChatCompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Returns how a chat answer's tokens are chosen; without a limit it may fill the model's length.

    Raises:
      InvalidRequestError: A field breaks its rule.
    """
    _check_stream(request)
    fields = _given(request, _SHARED)
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidRequestError("give max_completion_tokens or max_tokens, not two values", "max_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    if request.logprobs:
        fields["logprobs"] = request.top_logprobs or 0
    fields = {"max_tokens": None, **defaults, **fields}
    if limits:
        fields["max_tokens"] = limits.pop()
    return SamplingParams(**fields)


def _given(request: GenerationRequest, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(request, name) for name in names}
    fields = {name: value for name, value in values.items() if value is not None}
    if request.logit_bias:
        fields["logit_bias"] = _logit_bias(request.logit_bias)
    return fields


def _check_stream(request: GenerationRequest) -> None:
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream to be true", "stream_options")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise InvalidRequestError("continuous_usage_stats needs include_usage to be true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequestError("prompt_logprobs must be left out of a stream", "prompt_logprobs")


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    bias = {}
    for name, value in given.items():
        if not name.isascii() or not name.isdecimal() or len(name) > 10:
            raise InvalidRequestError(f"logit_bias's keys must be token ids, got {name!r:.80}", "logit_bias")
        bias[int(name)] = min(max(value, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS)  # stronger ones act as this, as elsewhere
    return bias
