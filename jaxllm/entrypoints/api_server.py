"""`python -m jaxllm.entrypoints.api_server`: a demo of AsyncLLMEngine behind two routes. For use, run jaxllm.serve.

POST /generate takes {"prompt": ..., "stream": false, and any field of SamplingParams} and answers {"text": [...]}, each
text with the prompt before it; with "stream", one such object a line, with all there is so far. GET /health.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

import msgspec
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.engine_args import EngineArgs
from jaxllm.entrypoints.arg_parser import ArgParser
from jaxllm.entrypoints.server_settings import DEFAULT_HOST, DEFAULT_PORT, bind_port
from jaxllm.exceptions import EngineDeadError, InvalidRequestError, JaxllmError, exit_code
from jaxllm.logger import configure_for_server
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams


class _GenerateRequest(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    params: SamplingParams
    stream: bool = False


def build_app(engine: AsyncLLMEngine) -> FastAPI:
    """Returns the demo's application."""
    app = FastAPI(title="jaxllm demo", docs_url=None, redoc_url=None)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if engine.status().phase == "ready" else 503)

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        try:
            return await _generate(engine, await request.body())
        except (InvalidRequestError, msgspec.MsgspecError) as error:
            return _error(400, str(error))
        except EngineDeadError:
            return _error(503, "the engine has stopped")

    return app


async def _generate(engine: AsyncLLMEngine, body: bytes) -> Response:
    request = _parse(body)
    await engine.wait_ready()
    outputs = engine.generate(request.prompt, request.params, uuid4().hex, final_only=not request.stream)
    first = await anext(outputs)  # a bad request shows here
    if request.stream:
        return StreamingResponse(_lines(first, outputs), media_type="application/x-ndjson")
    async with aclosing(outputs):
        return Response(_line(first), media_type="application/json")


def _parse(body: bytes) -> _GenerateRequest:
    """Splits a body into what is the demo's and what is SamplingParams'."""
    fields = msgspec.json.decode(body, type=dict[str, Any])
    own: dict[str, Any] = {name: fields.pop(name) for name in ("prompt", "stream") if name in fields}
    unknown = [name for name in fields if name not in SamplingParams.__struct_fields__]
    if unknown:
        raise InvalidRequestError(f"{unknown[0]:.80} is no field of a request", unknown[0])
    own["params"] = SamplingParams(**fields)
    return msgspec.convert(own, _GenerateRequest)


async def _lines(first: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(outputs):
        yield _line(first) + b"\n"
        async for output in outputs:
            yield _line(output) + b"\n"


def _line(output: RequestOutput) -> bytes:
    return msgspec.json.encode({"text": [f"{output.prompt}{sequence.text}" for sequence in output.outputs]})


def _error(status: int, message: str) -> Response:
    return Response(msgspec.json.encode({"error": message}), status, media_type="application/json")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo server and returns its exit code."""
    parser = ArgParser("jaxllm.entrypoints.api_server", "A demo server; for use, run jaxllm.serve.")
    parser.add_argument("--host", default=DEFAULT_HOST, help=f"address to listen on (default: {DEFAULT_HOST})")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"port (default: {DEFAULT_PORT})")
    EngineArgs.add_cli_args(parser)
    args = parser.parse(sys.argv[1:] if argv is None else argv)
    configure_for_server("text")
    try:
        listener = bind_port(args.host, args.port, "--port")
        return asyncio.run(_serve(AsyncLLMEngine.from_engine_args(EngineArgs.from_cli_args(args)), listener))
    except JaxllmError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return exit_code(error)
    except KeyboardInterrupt:
        return 0


async def _serve(engine: AsyncLLMEngine, listener: socket.socket) -> int:
    try:
        await engine.wait_ready()
        server = uvicorn.Server(uvicorn.Config(build_app(engine), log_config=None, lifespan="off"))
        await server.serve(sockets=[listener])
        return 0
    finally:
        await engine.shutdown()


if __name__ == "__main__":
    sys.exit(main())
