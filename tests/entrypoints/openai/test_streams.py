"""A stream and the same request's whole answer are the same: text, ids, log probabilities, reasons, usage."""

import asyncio
import itertools
from typing import Any

import pytest

from tests.fakes.asgi import FakeServer, fake_server
from tests.fakes.server_executor import expected_text

COMBINATIONS = list(itertools.product((False, True), (None, 0, 3), (1, 3), (None, ["is a"]), (12, 23)))


def joined_completion(events: list[Any]) -> dict[int, dict[str, Any]]:
    """Puts a stream's choices together; checks that each ends once, in a chunk without text."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in events:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "token_ids": [], "logprobs": None, "end": None})
            assert choice["end"] is None, "something came after the end"
            choice["text"] += part["text"]
            choice["token_ids"] += part.get("token_ids", [])
            if part["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {name: [] for name in part["logprobs"]}
                for name, values in part["logprobs"].items():
                    choice["logprobs"][name] += values
            if part["finish_reason"] is not None:
                assert part["text"] == ""
                choice["end"] = (part["finish_reason"], part["stop_reason"])
    return choices


async def check_completion(server: FakeServer, echo: bool, logprobs: int | None, n: int, stop: Any, size: int) -> None:
    body = {
        "prompt": ["Say: é", "Hi"],
        "max_tokens": size,
        "n": n,
        "echo": echo,
        "logprobs": logprobs,
        "stop": stop,
        "temperature": 0 if n == 1 else 1,
        "seed": 5,
        "return_token_ids": True,
    }
    whole = (await server.post("/v1/completions", body)).json
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = (await server.post("/v1/completions", {**body, **options})).events
    assert events[-1]["choices"] == []
    assert all("usage" not in chunk for chunk in events[:-1])
    # The second time the prompts are in the prefix cache; nothing else may differ.
    for usage in (whole["usage"], events[-1]["usage"]):
        del usage["prompt_tokens_details"]
    assert events[-1]["usage"] == whole["usage"]
    streamed = joined_completion(events)
    assert sorted(streamed) == list(range(2 * n)) == [choice["index"] for choice in whole["choices"]]
    for choice in whole["choices"]:
        parts = streamed[choice["index"]]
        assert parts["text"] == choice["text"]
        assert parts["token_ids"] == choice["token_ids"]
        assert parts["logprobs"] == choice["logprobs"]
        assert parts["end"] == (choice["finish_reason"], choice["stop_reason"])
        prompt = (["Say: é", "Hi"][choice["index"] // n]) if echo else ""
        text = expected_text(size, 0 if n == 1 else (5 + choice["index"] % n) % 7)
        if stop and stop[0] in text:
            text = text[: text.index(stop[0])]
            assert parts["end"] == ("stop", stop[0])
        assert choice["text"] == prompt + text


def test_completion_streams_add_up_to_the_whole_answer() -> None:
    async def run() -> None:
        async with fake_server() as server:
            for combination in COMBINATIONS:
                await check_completion(server, *combination)

    asyncio.run(run())


async def check_chat(server: FakeServer, logprobs: int | None, n: int, stop: Any, size: int) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": size,
        "n": n,
        "logprobs": logprobs is not None,
        "top_logprobs": logprobs,
        "stop": stop,
        "temperature": 0 if n == 1 else 1,
        "seed": 5,
        "return_token_ids": True,
    }
    whole = (await server.post("/v1/chat/completions", body)).json
    events = (await server.post("/v1/chat/completions", {**body, "stream": True})).events
    assert all("usage" not in chunk for chunk in events)
    for choice in whole["choices"]:
        mine = [part for chunk in events for part in chunk["choices"] if part["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [part["finish_reason"] for part in mine[:-1]] == [None] * (len(mine) - 1)
        assert (mine[-1]["delta"], mine[-1]["finish_reason"]) == ({}, choice["finish_reason"])
        assert "".join(part["delta"]["content"] for part in mine[1:-1]) == choice["message"]["content"]
        assert sum((part["token_ids"] for part in mine[1:-1]), []) == choice["token_ids"]
        if logprobs is None:
            assert choice["logprobs"] is None
            continue
        content = sum((part["logprobs"]["content"] for part in mine[1:-1]), [])
        assert content == choice["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [logprobs] * len(content)


def test_chat_streams_add_up_to_the_whole_answer() -> None:
    async def run() -> None:
        async with fake_server() as server:
            for _, logprobs, n, stop, size in COMBINATIONS:
                await check_chat(server, logprobs, n, stop, size)

    asyncio.run(run())


@pytest.mark.parametrize("size", range(1, 40))
def test_a_character_comes_whole_or_not_at_all(size: int) -> None:
    async def run() -> None:
        async with fake_server() as server:
            body = {"prompt": "a", "max_tokens": size, "temperature": 0, "stream": True}
            texts = [chunk["choices"][0]["text"] for chunk in (await server.post("/v1/completions", body)).events]
            assert "".join(texts) == expected_text(size)
            # Only the model's own end in the middle of a character may show as U+FFFD, once, and last.
            assert all("\ufffd" not in text for text in texts[:-2])

    asyncio.run(run())


def test_beam_search_gives_its_best_whole() -> None:
    async def run() -> None:
        async with fake_server() as server:
            body = {"prompt": "a", "max_tokens": 3, "use_beam_search": True, "n": 2, "best_of": 4}
            answer = (await server.post("/v1/completions", body)).json
            assert [choice["text"] for choice in answer["choices"]][0] == "aaa"
            assert [choice["index"] for choice in answer["choices"]] == [0, 1]
            assert answer["usage"]["completion_tokens"] == 6

    asyncio.run(run())


def test_an_echo_without_tokens_shows_the_prompt_alone() -> None:
    async def run() -> None:
        async with fake_server() as server:
            body = {"prompt": "Héa", "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
            whole = (await server.post("/v1/completions", body)).json
            (choice,) = whole["choices"]
            assert (choice["text"], whole["usage"]["completion_tokens"]) == ("Héa", 0)
            assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -3.0]
            events = (await server.post("/v1/completions", {**body, "stream": True})).events
            assert [chunk["choices"][0]["text"] for chunk in events] == ["Héa", ""]
            assert events[0]["choices"][0]["logprobs"] == choice["logprobs"]

    asyncio.run(run())


def test_running_usage_counts_up() -> None:
    async def run() -> None:
        async with fake_server() as server:
            options = {"include_usage": True, "continuous_usage_stats": True}
            body = {"prompt": "abc", "max_tokens": 6, "temperature": 0, "stream": True, "stream_options": options}
            events = (await server.post("/v1/completions", body)).events
            counts = [chunk["usage"]["completion_tokens"] for chunk in events]
            assert counts == sorted(counts) and counts[-2:] == [6, 6]
            assert {chunk["usage"]["prompt_tokens"] for chunk in events} == {3}
            plain = (await server.post("/v1/completions", {**body, "stream_options": {}})).events
            assert all("usage" not in chunk for chunk in plain)

    asyncio.run(run())
