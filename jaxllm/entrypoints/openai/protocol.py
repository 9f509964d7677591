"""What may stand in a request's body. The only pydantic models; answers are plain dicts (answer_parts.py).

Names and meanings are OpenAI's, and vLLM's where OpenAI has none. Ranges are SamplingParams' business: these models say
which fields exist and of what kind they are. A field that isn't here is refused by name, unless its value asks for
nothing (`neutral_fields`).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from jaxllm.sampling_params import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
)

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
_PROMPT_SCHEMA: JsonDict = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
        },
    ]
}
# Fields of other servers that aren't implemented here, with the values that ask for nothing beside null.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none",),
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),
    "continue_final_message": (False,),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
}


class _Body(BaseModel):
    # Unknown fields are kept, so that they can be refused by name; the schema says that there are none.
    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra={"additionalProperties": False})


class StreamOptions(_Body):
    """When to report usage in a stream: at its end, and with `continuous_usage_stats` in every chunk as well."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(_Body):
    """The fields that completions and chat completions share."""

    model: str | None = Field(None, description="One of the names that /v1/models lists; left out, the first of them.")
    n: int | None = Field(None, ge=1, le=128)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    logit_bias: dict[str, float] | None = Field(None, description="Token id -> what is added to its logit.")
    allowed_token_ids: list[int] | None = Field(None, min_length=1, max_length=MAX_ALLOWED_TOKENS)
    bad_words: list[str] | None = Field(None, max_length=MAX_BAD_WORDS)
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    # Labels, which change nothing.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Any = Field(..., json_schema_extra=_PROMPT_SCHEMA)
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = Field(None, ge=1)
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: list[Any] | None = Field(None, max_length=0)


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(..., min_length=1, max_length=4096)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool | None = None


class TokenizeRequest(_Body):
    """POST /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=4096)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]] = Field(..., max_length=1 << 20)
