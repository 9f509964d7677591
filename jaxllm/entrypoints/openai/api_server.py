"""The HTTP application: every route, and nothing of what they do. serve.py runs it."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response

import jaxllm
from jaxllm.entrypoints.openai.body import BodyReader
from jaxllm.entrypoints.openai.disconnect import while_connected
from jaxllm.entrypoints.openai.errors import ApiError, to_api_error
from jaxllm.entrypoints.openai.metrics_page import MetricsPage
from jaxllm.entrypoints.openai.probes import Probes
from jaxllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from jaxllm.entrypoints.openai.responses import error_response, json_response
from jaxllm.entrypoints.openai.serving_chat import ChatService
from jaxllm.entrypoints.openai.serving_completion import CompletionService
from jaxllm.entrypoints.openai.serving_engine import ServingEngine
from jaxllm.entrypoints.openai.serving_models import ModelService
from jaxllm.entrypoints.openai.serving_tokens import TokenService

Body = TypeVar("Body", bound=BaseModel)
_BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_STATUS_CODES = {404: "not_found", 405: "method_not_allowed"}


def build_app(serving: ServingEngine, page: MetricsPage) -> FastAPI:
    """Returns the application, without the gate in front of it."""
    app = FastAPI(title="jaxllm", version=jaxllm.__version__, redoc_url=None)
    app.add_exception_handler(HTTPException, _on_http_error)
    _add_probes(app, Probes(serving))
    bodies = BodyReader()
    _add_generation(app, bodies, serving)
    _add_tokens(app, bodies, TokenService(serving))
    _add_facts(app, serving, page)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]  # FastAPI's documented way
    return app


def _add_probes(app: FastAPI, probes: Probes) -> None:
    app.get("/live")(probes.live)
    app.get("/ready")(probes.ready)
    app.get("/health")(probes.health)


def _add_generation(app: FastAPI, bodies: BodyReader, serving: ServingEngine) -> None:
    _add_post(app, bodies, "/v1/completions", CompletionRequest, CompletionService(serving).create)
    _add_post(app, bodies, "/v1/chat/completions", ChatCompletionRequest, ChatService(serving).create)


def _add_tokens(app: FastAPI, bodies: BodyReader, tokens: TokenService) -> None:
    _add_post(app, bodies, "/tokenize", TokenizeRequest, tokens.tokenize)
    _add_post(app, bodies, "/detokenize", DetokenizeRequest, tokens.detokenize)


def _add_facts(app: FastAPI, serving: ServingEngine, page: MetricsPage) -> None:
    models = ModelService(serving)

    @app.get("/v1/models")
    async def list_models() -> Response:
        return await _answer(models.list())

    @app.get("/v1/models/{model:path}")
    async def get_model(model: str) -> Response:
        return await _answer(models.get(model))

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": jaxllm.__version__})

    @app.get("/load")
    async def load() -> Response:
        return json_response({"server_load": serving.admission.num_requests})

    @app.get("/metrics")
    async def get_metrics() -> Response:
        return await _answer(page.get())


def _add_post(
    app: FastAPI,
    bodies: BodyReader,
    path: str,
    model: type[Body],
    handle: Callable[[Body], Coroutine[Any, Any, Response]],
) -> None:
    """Adds a route that reads a JSON body; the work for it ends when its client goes."""

    async def route(request: Request) -> Response:
        async def read_and_handle() -> Response:
            body = await bodies.read(request, model)
            return await while_connected(request, handle(body))

        return await _answer(read_and_handle(), prompt_field)

    prompt_field = "messages" if model is ChatCompletionRequest else "prompt"
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    body_doc = {"required": True, "content": {"application/json": {"schema": schema}}}
    app.post(path, openapi_extra={"requestBody": body_doc}, summary=model.__doc__)(route)


async def _answer(work: Awaitable[Response], prompt_field: str = "prompt") -> Response:
    """Returns the answer, or the error that came instead."""
    try:
        return await work
    except Exception as error:
        return error_response(to_api_error(error, prompt_field))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answers what the router refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    status = error.status_code if error.status_code in _STATUS_CODES else 400
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return error_response(ApiError(status, message, code=_STATUS_CODES.get(status)))


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Returns the document of all routes, the schemas of our bodies among them."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        models: list[Any] = [(model, "validation") for model in _BODIES.values()]
        _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        app.openapi_schema = document
    return app.openapi_schema
