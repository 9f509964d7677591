"""Large bodies and long texts are worked through beside the event loop, on few threads, so that probes are answered."""

import asyncio
import json
import sys
import threading
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, field_validator
from starlette.requests import Request
from starlette.types import Message

from jaxllm.engine.front_end import FrontEnd
from jaxllm.entrypoints.openai import http_server
from jaxllm.entrypoints.openai.body import BodyReader
from jaxllm.entrypoints.openai.errors import ApiError
from tests.fakes.asgi import SERVER_EXECUTOR, fake_server
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.fake_cores import fake_config

MAIN, BODY, TOKENIZER = "MainThread", "body", "tokenizer"


class NamesItsThread(BaseModel):
    model_config = ConfigDict(extra="allow")
    prompt: list[int]

    @field_validator("prompt")
    @classmethod
    def look(cls, value: list[int]) -> list[int]:
        threads.append(threading.current_thread().name.split("_")[0])
        return value


threads: list[str] = []


class NamingTokenizer(ByteTokenizer):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread().name.split("_")[0])
        return super().encode(text, add_special_tokens)


async def read(content: Any) -> NamesItsThread:
    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps(content).encode(), "more_body": False}

    return await BodyReader().read(Request({"type": "http", "headers": []}, receive), NamesItsThread)


@pytest.mark.parametrize(("num_ids", "thread"), [(3, MAIN), (100_000, BODY)])
def test_a_large_body_is_parsed_on_a_thread(num_ids: int, thread: str) -> None:
    threads.clear()
    assert asyncio.run(read({"prompt": [7] * num_ids})).prompt == [7] * num_ids
    assert threads == [thread]


def test_errors_of_large_bodies_are_those_of_small_ones() -> None:
    for prompt in ([], [0] * 100_000):
        with pytest.raises(ApiError, match="nonsense is not supported") as caught:
            asyncio.run(read({"prompt": prompt, "nonsense": 1}))
        assert (caught.value.status, caught.value.param) == (400, "nonsense")


@pytest.mark.parametrize(("num_chars", "thread"), [(3, MAIN), (10_000, TOKENIZER)])
def test_long_texts_are_tokenized_on_the_engines_threads(num_chars: int, thread: str) -> None:
    text = "a" * num_chars
    messages = [{"role": "user", "content": text}]

    async def run() -> None:
        parts = FrontEnd(fake_config(SERVER_EXECUTOR, 128), NamingTokenizer(), [257])
        async with fake_server(front_end=parts) as server:
            for path, body in (
                ("/tokenize", {"prompt": text}),
                ("/tokenize", {"messages": messages}),
                ("/v1/completions", {"prompt": text, "max_tokens": 1}),
                ("/v1/chat/completions", {"messages": messages, "max_tokens": 1}),
            ):
                threads.clear()
                reply = await server.post(path, body)
                assert reply.status == (200 if path == "/tokenize" or num_chars < 128 else 400)
                assert reply.status == 200 or reply.error["code"] == "context_length_exceeded"
                assert threads == [thread], (path, list(body))

    asyncio.run(run())


def test_no_thread_keeps_the_servers_loop_waiting_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop waits for its turn at every connection that it reads: 20 times 5 ms, Python's own, are 100."""

    async def serve(*args: Any) -> float:
        return sys.getswitchinterval()

    monkeypatch.setattr(http_server, "_serve", serve)
    before_s = sys.getswitchinterval()
    try:
        args: Any = (None, None, None)
        assert http_server.run_servers(*args) <= 0.001
    finally:
        sys.setswitchinterval(before_s)


@pytest.mark.parametrize("prompt", [[1, True], [1, 2.5], [1, "a"], [1, [2]], ["a", ["b"]], [None], []])
def test_prompts_of_mixed_kinds_are_refused(prompt: list[Any]) -> None:
    async def run() -> None:
        async with fake_server() as server:
            reply = await server.post("/v1/completions", {"prompt": prompt})
            assert (reply.status, reply.error["param"]) == (400, "prompt")

    asyncio.run(run())
