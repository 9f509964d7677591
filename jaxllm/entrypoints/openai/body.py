"""From a request's bytes to one of protocol.py's models: size, JSON, kinds of fields, fields that aren't ours."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from jaxllm.entrypoints.openai.errors import ApiError, unsupported_field
from jaxllm.entrypoints.openai.protocol import NEUTRAL_VALUES

MAX_BODY_BYTES = 8 << 20
MAX_DEPTH = 64
_INLINE_BYTES = 16 << 10  # handing less than this to a thread costs more than doing it
Model = TypeVar("Model", bound=BaseModel)

_decoder = msgspec.json.Decoder()


class BodyReader:
    """Reads bodies; large ones may hold millions of token ids, and are parsed beside the event loop, one at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "body")

    async def read(self, request: Request, model: type[Model]) -> Model:
        """Reads and checks a request's body.

        Raises:
          ApiError: 413 if it is too large, else 400: it is no JSON, or a field is missing, wrong or not supported.
        """
        data = await _read_bytes(request)
        if len(data) <= _INLINE_BYTES:
            return _parse(data, model)
        return await asyncio.get_running_loop().run_in_executor(self._thread, _parse, data, model)


def _parse(data: bytes, model: type[Model]) -> Model:
    try:
        value = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error).splitlines()[0][:200] if isinstance(error, msgspec.DecodeError) else "malformed"
        raise ApiError(400, f"the body must be JSON: {reason}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(value).__name__}", code="invalid_json")
    _check_depth(value, MAX_DEPTH)
    try:
        parsed = model.model_validate(value)
    except ValidationError as error:
        _check_extra(value, model)  # a name that we don't know says more than a kind that doesn't fit
        raise _field_error(error) from None
    _check_extra(value, model)
    _check_parts(parsed)
    return parsed


async def _read_bytes(request: Request) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    pieces = bytearray()
    async for piece in request.stream():
        pieces += piece
        if len(pieces) > MAX_BODY_BYTES:
            raise _too_large()
    return bytes(pieces)


def _too_large() -> ApiError:
    return ApiError(413, f"the body may have at most {MAX_BODY_BYTES} bytes", code="request_too_large")


def _check_depth(value: Any, room: int) -> None:
    if not isinstance(value, (dict, list)):
        return
    if room == 0:
        raise ApiError(400, f"the body's JSON may be at most {MAX_DEPTH} levels deep", code="invalid_json")
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (dict, list)):
            _check_depth(item, room - 1)


def _check_extra(value: Mapping[str, Any], model: type[BaseModel]) -> None:
    for name, content in value.items():
        if name in model.model_fields or content is None:
            continue
        if not any(_is_same(content, neutral) for neutral in NEUTRAL_VALUES.get(name, ())):
            raise unsupported_field(name[:100])


def _is_same(value: Any, neutral: Any) -> bool:
    """Whether two JSON values are equal; true and 1 are not."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _check_parts(parsed: BaseModel) -> None:
    """Refuses unknown fields of the objects inside a body: stream options, messages and their parts."""
    for value in vars(parsed).values():
        for part in value if isinstance(value, list) else (value,):
            if isinstance(part, BaseModel):
                _check_extra(vars(part) | (part.model_extra or {}), type(part))
                _check_parts(part)


def _field_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ""
    for step in first["loc"]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif "[" not in step and step not in ("str", "function-after", "list"):
            path += f".{step}" if path else step
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "missing":
        return ApiError(400, f"{path} is required", param, "missing_required_parameter")
    return ApiError(400, f"{path}: {first['msg']}", param, "invalid_value")
