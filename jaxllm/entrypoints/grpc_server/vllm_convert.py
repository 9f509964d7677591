"""vllm.grpc.engine messages <-> the engine's types. Knows no engine and no call."""

from collections.abc import Sequence
from typing import Any

from jaxllm.engine.input_processor import Prompt
from jaxllm.entrypoints.grpc_server import descriptors
from jaxllm.entrypoints.grpc_server.convert import most_likely, present_fields
from jaxllm.exceptions import InvalidRequestError
from jaxllm.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from jaxllm.sampling_params import SamplingParams

_message_class = descriptors.message_class
_GenerateResponse = _message_class("vllm.grpc.engine.GenerateResponse")
_GenerateStreamChunk = _message_class("vllm.grpc.engine.GenerateStreamChunk")
_GenerateComplete = _message_class("vllm.grpc.engine.GenerateComplete")
_OutputLogProbs = _message_class("vllm.grpc.engine.OutputLogProbs")
_InputLogProbs = _message_class("vllm.grpc.engine.InputLogProbs")
_TopLogProbs = _message_class("vllm.grpc.engine.TopLogProbs")

# Fields that ask for what isn't there -> the values that ask for nothing, besides their zero.
_UNSUPPORTED_PARAMS: dict[str, tuple[Any, ...]] = {
    "truncate_prompt_tokens": (),
    "json_schema": (),
    "regex": (),
    "grammar": (),
    "structural_tag": (),
    "json_object": (),
    "choice": (),
}
_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "kv_transfer_params": (),
    "kv_transfer_params_json": (),
    "mm_inputs": (),
    "extra_mm_inputs": (),
    "media_refs": (),
    "data_parallel_rank": (0,),
}
# Only of effect on text, which this contract doesn't return, or beside a constraint.
_WITHOUT_EFFECT = ("spaces_between_special_tokens", "grammar_from_first_token")


def to_sampling_params(message: Any) -> SamplingParams:
    """Returns what a vllm.grpc.engine.SamplingParams says; zeros and absent fields ask for the default.

    Raises:
      InvalidRequestError: A field breaks its rule, or asks for something that isn't supported.
    """
    _refuse_unsupported(message, _UNSUPPORTED_PARAMS)
    # Text is needed only to find stop strings in it.
    defaults = {"max_tokens": None, "skip_special_tokens": False, "detokenize": bool(message.stop)}
    ignored = (*_UNSUPPORTED_PARAMS, *_WITHOUT_EFFECT)
    given = {name: value for name, value in present_fields(message).items() if name not in ignored}
    return SamplingParams(**{**defaults, **given})


def to_prompt(request: Any) -> Prompt:
    """Returns the prompt of a vllm.grpc.engine.GenerateRequest.

    Raises:
      InvalidRequestError: It has none, or asks for something that isn't supported.
    """
    _refuse_unsupported(request, _UNSUPPORTED_FIELDS)
    match request.WhichOneof("input"):
        case "text":
            return {"prompt": str(request.text)}
        case "tokenized":
            return {"prompt_token_ids": list(request.tokenized.input_ids)}
    raise InvalidRequestError("a request needs an input: set tokenized or text", "input")


def to_chunk(output: RequestOutput, part: CompletionOutput, is_first: bool, params: SamplingParams) -> Any:
    """Returns a GenerateResponse with what is new of one sequence."""
    chunk = _GenerateStreamChunk(
        token_ids=part.token_ids,
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=len(part.token_ids),
        cached_tokens=output.num_cached_tokens,
        output_logprobs=_output_logprobs(part, params.logprobs),
        input_logprobs=_input_logprobs(output, params.prompt_logprobs) if is_first else None,
        index=part.index,
    )
    return _GenerateResponse(chunk=chunk)


def to_complete(output: RequestOutput, completion: CompletionOutput, params: SamplingParams) -> Any:
    """Returns a GenerateResponse with one whole sequence."""
    complete = _GenerateComplete(
        output_ids=completion.token_ids,
        finish_reason=completion.finish_reason or "",
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=len(completion.token_ids),
        cached_tokens=output.num_cached_tokens,
        output_logprobs=_output_logprobs(completion, params.logprobs),
        input_logprobs=_input_logprobs(output, params.prompt_logprobs),
        index=completion.index,
    )
    if isinstance(completion.stop_reason, str):
        complete.matched_stop_str = completion.stop_reason
    elif completion.stop_reason is not None:
        complete.matched_token_id = completion.stop_reason
    return _GenerateResponse(complete=complete)


def _refuse_unsupported(message: Any, unsupported: dict[str, tuple[Any, ...]]) -> None:
    for field, value in message.ListFields():
        if field.name in unsupported and value not in unsupported[field.name]:
            raise InvalidRequestError(f"{field.name} isn't supported by this server; leave it out", field.name)


def _output_logprobs(completion: CompletionOutput, num_top: int | None) -> Any:
    if completion.logprobs is None or num_top is None:
        return None
    pairs = list(zip(completion.token_ids, completion.logprobs, strict=True))
    return _OutputLogProbs(
        token_logprobs=[position[token_id].logprob for token_id, position in pairs],
        token_ids=completion.token_ids,
        top_logprobs=_top_logprobs(completion.logprobs, num_top),
    )


def _input_logprobs(output: RequestOutput, num_top: int | None) -> Any:
    if output.prompt_logprobs is None or num_top is None:
        return None
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return _InputLogProbs(
        token_logprobs=[{"value": None if position is None else position[token].logprob} for token, position in pairs],
        token_ids=output.prompt_token_ids,
        top_logprobs=_top_logprobs(output.prompt_logprobs, num_top),
    )


def _top_logprobs(positions: Sequence[PositionLogprobs | None], num_top: int) -> list[Any]:
    """Returns one TopLogProbs a position; none at all if no likely tokens were asked for."""
    if num_top == 0:
        return []
    tops = [[] if position is None else most_likely(position, num_top) for position in positions]
    return [
        _TopLogProbs(values=[logprob.logprob for _, logprob in top], token_ids=[token_id for token_id, _ in top])
        for top in tops
    ]
