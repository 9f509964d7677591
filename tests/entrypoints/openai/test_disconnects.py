"""Clients that go, and engines that die: what they asked for ends, others go on, every block comes back."""

import asyncio
import random
from typing import Any

import pytest

from tests.fakes.asgi import Call, FakeServer, fake_server
from tests.fakes.gated_executor import GatedExecutor
from tests.fakes.server_executor import expected_text

COMPLETION = {"prompt": "a" * 20, "max_tokens": 1000, "temperature": 0}
ALPHABET = "tests.fakes.fake_cores:AlphabetExecutor"


async def until_idle(server: FakeServer) -> None:
    while await server.metric("vllm:kv_cache_usage_perc") or server.engine.num_unfinished_requests:
        await asyncio.sleep(0.01)
    assert await server.metric("vllm:num_requests_running") == 0
    assert server.serving.admission.num_requests == server.serving.admission.num_waiting == 0


@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1}, {"prompt": ["a", "b", "c"]}])
@pytest.mark.parametrize("stream", [True, False])
def test_what_a_client_asked_for_ends_when_it_goes(fields: dict[str, Any], stream: bool) -> None:
    async def run() -> None:
        async with fake_server(ALPHABET, max_model_len=2000) as server:
            call = server.call("POST", "/v1/completions", {**COMPLETION, **fields, "stream": stream})
            while not await server.metric("vllm:kv_cache_usage_perc"):
                await asyncio.sleep(0.01)
            call.disconnect()
            await call.reply()
            await until_idle(server)
            text = (await server.get("/metrics")).body.decode()
            num = len(fields["prompt"]) if "prompt" in fields else 1
            assert f'finished_reason="abort",model_name="fake"}} {num}.0' in text

    asyncio.run(run())


@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1}])
def test_the_blocks_of_a_closed_stream_are_free_after_the_step_that_runs(fields: dict[str, Any]) -> None:
    gate, num_begun = GatedExecutor.gate, GatedExecutor.num_begun

    async def run() -> None:
        async with fake_server("tests.fakes.gated_executor:GatedExecutor", max_model_len=2000) as server:
            gate.release(3)
            call = server.call("POST", "/v1/completions", {**COMPLETION, **fields, "stream": True})
            while GatedExecutor.num_begun < num_begun + 4:
                await asyncio.sleep(0.01)
            call.disconnect()
            await call.reply()
            while server.engine.num_unfinished_requests:
                await asyncio.sleep(0.01)
            assert await server.metric("vllm:kv_cache_usage_perc") > 0
            gate.release()  # the step that had begun when the client went; another one would wait for ever
            await asyncio.wait_for(until_idle(server), 250)
            assert GatedExecutor.num_begun == num_begun + 4

    asyncio.run(run())


def test_two_hundred_streams_of_which_half_are_dropped() -> None:
    draw = random.Random(7)

    async def live(server: FakeServer, call: Call, drops_at: int | None) -> None:
        if drops_at is None:
            await call.reply()
            return
        if drops_at:
            await call.until(drops_at)
        call.disconnect()
        await call.reply()

    async def run() -> None:
        async with fake_server(max_model_len=200) as server:
            calls = []
            for number in range(200):
                path = "/v1/completions" if number % 2 else "/v1/chat/completions"
                prompt = {"prompt": f"{number}"} if number % 2 else {"messages": [{"role": "user", "content": "a"}]}
                body = {**prompt, "max_tokens": 40, "temperature": 1, "seed": 3, "n": 1 + 3 * (number % 3 == 0)}
                calls.append(server.call("POST", path, {**body, "stream": True}))
            drops = [draw.choice([0, 1, 500, 3000]) if draw.random() < 0.5 else None for _ in calls]
            await asyncio.gather(*(live(server, call, drop) for call, drop in zip(calls, drops, strict=True)))
            await until_idle(server)
            survivors = [call for call, drop in zip(calls, drops, strict=True) if drop is None]
            assert 50 < len(survivors) < 150
            for call in survivors:
                check_whole(call)

    asyncio.run(run())


def check_whole(call: Call) -> None:
    texts: dict[int, str] = {}
    for chunk in call.received.events:
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    assert texts == {index: expected_text(40, (3 + index) % 7) for index in texts}


def test_a_full_queue_turns_the_excess_away_and_answers_the_rest() -> None:
    async def run() -> None:
        async with fake_server(max_queue=256) as server:
            body = {"prompt": "a", "max_tokens": 4, "temperature": 0}
            replies = await asyncio.gather(*(server.post("/v1/completions", body) for _ in range(2000)))
            refused = [reply for reply in replies if reply.status == 429]
            answered = [reply for reply in replies if reply.status == 200]
            assert len(refused) + len(answered) == 2000
            assert 256 <= len(answered) < 2000
            for reply in refused:
                assert (reply.error["code"], reply.error["type"]) == ("queue_full", "rate_limit_error")
                assert int(reply.headers["retry-after"]) >= 1
            assert {reply.json["choices"][0]["text"] for reply in answered} == {expected_text(4)}
            await until_idle(server)
            assert (await server.post("/v1/completions", {**body, "n": 128, "temperature": 1})).status == 200

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
def test_when_the_engine_dies_every_client_is_told(stream: bool) -> None:
    async def run() -> None:
        async with fake_server(ALPHABET, max_model_len=2000) as server:
            calls = [server.call("POST", "/v1/completions", {**COMPLETION, "stream": stream}) for _ in range(32)]
            if stream:
                await asyncio.gather(*(call.until(1) for call in calls))
            else:
                while await server.metric("vllm:num_requests_running") < 32:
                    await asyncio.sleep(0.01)
            await server.post("/v1/completions", {"prompt": "!"})
            for call in calls:
                reply = await call.reply()
                if stream:
                    assert reply.status == 200
                    last = reply.events[-1]["error"]
                    assert (last["code"], last["type"]) == ("engine_dead", "service_unavailable_error")
                else:
                    assert (reply.status, reply.error["code"]) == (503, "engine_dead")
            health = await server.get("/health")
            assert (health.status, health.json["phase"]) == (503, "dead")
            assert (await server.get("/live")).status == 200
            assert (await server.post("/v1/completions", COMPLETION)).status == 503
            assert (await server.get("/metrics")).status == 200

    asyncio.run(run())
