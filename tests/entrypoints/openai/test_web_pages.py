"""Which web pages a browser lets ask, and that none may unless the server's owner says so."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.fakes.asgi import FakeServer, Reply, fake_server

PAGE = "https://chat.example"
HOSTS = ("localhost", "127.0.0.1", "[::1]")
COMPLETION = {"prompt": "a", "max_tokens": 2, "temperature": 0}


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def is_readable(reply: Reply, origin: str) -> bool:
    return reply.headers.get("access-control-allow-origin") in (origin, "*")


async def preflight(server: FakeServer, path: str, origin: str) -> Reply:
    """What a browser asks before a page may send a JSON body and a key."""
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    return await server.call("OPTIONS", path, None, headers).reply()


def test_by_default_no_answer_may_be_read() -> None:
    async def scenario() -> None:
        async with fake_server(api_keys=("key",)) as server:
            replies = [await preflight(server, "/v1/completions", PAGE)]
            for headers in ({"origin": PAGE}, {"origin": PAGE, "authorization": "Bearer key"}):
                replies.append(await server.post("/v1/completions", COMPLETION, headers))
                replies.append(await server.get("/health", headers))
            assert [reply.status for reply in replies] == [401, 401, 200, 200, 200]
            assert not any(name.startswith("access-control") for reply in replies for name in reply.headers)

    run(scenario())


def test_allowed_pages_ask_before_they_show_their_key() -> None:
    async def scenario() -> None:
        async with fake_server(api_keys=("key",), allowed_origins=(PAGE,)) as server:
            asked = await preflight(server, "/v1/completions", PAGE)
            assert asked.status == 200 and is_readable(asked, PAGE)
            assert "authorization" in asked.headers["access-control-allow-headers"]
            assert "POST" in asked.headers["access-control-allow-methods"]
            assert "access-control-allow-credentials" not in asked.headers
            with_key = await server.post("/v1/completions", COMPLETION, {"origin": PAGE, "authorization": "Bearer key"})
            assert with_key.status == 200 and is_readable(with_key, PAGE)
            assert "x-request-id" in with_key.headers["access-control-expose-headers"]
            without = await server.post("/v1/completions", COMPLETION, {"origin": PAGE})
            assert without.error["code"] == "invalid_api_key" and is_readable(without, PAGE)
            for other in ("https://evil.example", "http://chat.example", PAGE + ".evil", "null"):
                assert not is_readable(await preflight(server, "/v1/completions", other), other)
                assert not is_readable(await server.get("/v1/models", {"origin": other}), other)

    run(scenario())


def test_a_full_queue_tells_pages_so_too() -> None:
    async def scenario() -> None:
        async with fake_server(max_queue=1, allowed_origins=(PAGE,)) as server:
            ticket = server.serving.admission.admit(1)
            reply = await server.post("/v1/completions", COMPLETION, {"origin": PAGE})
            assert reply.status == 429 and is_readable(reply, PAGE)
            assert "retry-after" in reply.headers["access-control-expose-headers"]
            ticket.close()

    run(scenario())


@pytest.mark.parametrize(
    ("allowed", "origin", "status"),
    [
        ((), "https://evil.example", 403),
        ((), "http://localhost.evil.example", 403),
        ((), "null", 403),
        ((), "", 403),
        ((), "http://localhost:8000", 200),
        ((), "http://127.0.0.1:3000", 200),
        ((), "http://[::1]:8000", 200),
        ((PAGE,), PAGE, 200),
        ((PAGE,), PAGE + ":444", 403),
        (("*",), "https://evil.example", 200),
    ],
)
def test_without_a_key_other_pages_cant_even_ask(allowed: tuple[str, ...], origin: str, status: int) -> None:
    """A page needs no leave to send a plain POST to this machine: only its answer is kept from it."""

    async def scenario() -> None:
        async with fake_server(allowed_hosts=HOSTS, allowed_origins=allowed) as server:
            headers = {"origin": origin, "content-type": "text/plain"}
            reply = await server.post("/v1/completions", COMPLETION, headers)
            assert reply.status == status
            assert status == 200 or reply.error["code"] == "origin_not_allowed"
            assert (await server.get("/health", headers)).status == 200

    run(scenario())
