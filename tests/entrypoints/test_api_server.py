"""The demo server: one JSON object, or one a line with all there is so far; bad parameters are a 400."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.entrypoints.api_server import build_app
from tests.fakes.asgi import SERVER_EXECUTOR, Call
from tests.fakes.fake_cores import ThreadCore, fake_config, fake_front_end
from tests.fakes.server_executor import expected_text


class Demo:
    def __init__(self, engine: AsyncLLMEngine) -> None:
        self.engine = engine
        self.app = build_app(engine)

    def call(self, body: Any) -> Call:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return Call(self.app, "POST", "/generate", data, {})


@asynccontextmanager
async def demo() -> AsyncIterator[Demo]:
    parts = fake_front_end(fake_config(SERVER_EXECUTOR, 2000))
    engine = AsyncLLMEngine(lambda: parts, connect=ThreadCore)
    await engine.wait_ready()
    yield Demo(engine)
    await engine.shutdown()


def test_whole_and_line_by_line() -> None:
    async def run() -> None:
        async with demo() as server:
            body = {"prompt": "Say: ", "max_tokens": 12, "temperature": 0}
            whole = await server.call(body).reply()
            assert (whole.status, whole.json) == (200, {"text": ["Say: " + expected_text(12)]})
            lines = (await server.call({**body, "stream": True}).reply()).body.splitlines()
            texts = [json.loads(line)["text"][0] for line in lines]
            assert texts[-1] == "Say: " + expected_text(12)
            assert all(after.startswith(before) for before, after in zip(texts, texts[1:], strict=False))
            assert (await Call(server.app, "GET", "/health", b"", {}).reply()).status == 200
            two = (await server.call({**body, "n": 2, "temperature": 1, "seed": 0}).reply()).json["text"]
            assert two == ["Say: " + expected_text(12, shift) for shift in (0, 1)]

    asyncio.run(run())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        {},
        {"prompt": ""},
        {"prompt": 5},
        {"prompt": "a", "stream": "yes"},
        {"prompt": "a", "temperature": -1},
        {"prompt": "a", "max_tokens": "many"},
        {"prompt": "a", "colour": "red"},
        {"prompt": "a" * 3000},
    ],
)
def test_bad_parameters_are_a_400(body: Any) -> None:
    async def run() -> None:
        async with demo() as server:
            reply = await server.call(body).reply()
            assert reply.status == 400
            assert set(reply.json) == {"error"}

    asyncio.run(run())


def test_a_client_that_goes_ends_its_request() -> None:
    async def run() -> None:
        async with demo() as server:
            call = server.call({"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True})
            await call.until(1)
            assert server.engine.num_unfinished_requests == 1
            call.disconnect()
            await call.reply()
            while server.engine.num_unfinished_requests:
                await asyncio.sleep(0.01)

    asyncio.run(run())
