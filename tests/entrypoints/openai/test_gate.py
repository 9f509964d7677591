"""Keys, hosts and request ids: the gate stands before every route but the probes, whatever the path looks like."""

import asyncio
from typing import Any

import pytest
from starlette.routing import Route

from tests.fakes.asgi import FakeServer, fake_server

KEYS = ("first-key", "second-key")
BAD_AUTHORIZATIONS = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": "Bearer first-ke"},
    {"authorization": "Bearer first-key\0"},
    {"authorization": "Bearer first-keyx"},
    {"authorization": "first-key"},
    {"authorization": "Basic first-key"},
    {"authorization": "Bearer "},
    {"x-api-key": "first-key"},
]
ODD_PATHS = ["//v1/models", "/v1/../health", "/health/", "/HEALTH", "/health/../v1/models", "/healthx", "/ready/x", ""]


def routes(server: FakeServer) -> list[tuple[str, str]]:
    found = []
    for route in server.app._app.routes:
        assert isinstance(route, Route), "a route of a kind that this test doesn't know"
        found += [(method, route.path.replace("{model:path}", "x")) for method in route.methods or ()]
    return found


def test_every_route_but_the_probes_needs_a_key() -> None:
    async def run() -> None:
        async with fake_server(api_keys=KEYS) as server:
            assert len(routes(server)) >= 14
            for method, path in [*routes(server), *(("GET", path) for path in ODD_PATHS)]:
                for headers in BAD_AUTHORIZATIONS:
                    reply = await server.call(method, path, {}, headers).reply()
                    if path in ("/live", "/ready", "/health"):
                        assert reply.status != 401
                    else:
                        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), (method, path, headers)

    asyncio.run(run())


def test_the_host_header_opens_nothing() -> None:
    async def run() -> None:
        async with fake_server(api_keys=KEYS) as server:
            for host in ("h/health?x=", "localhost/health", "evil.example"):
                call = server.call("GET", "/v1/models")
                call._scope["headers"] = [(b"host", host.encode())]
                assert (await call.reply()).status == 401
            twice = server.call("GET", "/v1/models")
            twice._scope["headers"] = [(b"authorization", b"Bearer first-key")] * 2
            assert (await twice.reply()).status == 401

    asyncio.run(run())


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(key: str) -> None:
    async def run() -> None:
        async with fake_server(api_keys=KEYS) as server:
            for scheme in ("Bearer", "bearer"):
                assert (await server.get("/v1/models", {"authorization": f"{scheme} {key}"})).status == 200

    asyncio.run(run())


def test_without_a_key_other_hosts_are_refused() -> None:
    hosts = ("localhost", "127.0.0.1", "[::1]")
    cases = [("localhost", 200), ("localhost:8000", 200), ("[::1]:8000", 200), ("LOCALHOST", 200)]
    cases += [("evil.example", 403), ("evil.example:8000", 403), ("localhost.evil.example", 403), ("", 403)]

    async def run() -> None:
        async with fake_server(allowed_hosts=hosts) as server:
            for host, status in cases:
                call = server.call("GET", "/v1/models")
                call._scope["headers"] = [(b"host", host.encode())]
                assert (await call.reply()).status == status, host

    asyncio.run(run())


@pytest.mark.parametrize(
    ("given", "is_kept"), [("mine-1", True), ("a" * 128, True), ("a" * 129, False), ("a b", False)]
)
def test_a_harmless_request_id_is_echoed(given: str, is_kept: bool) -> None:
    async def run() -> Any:
        async with fake_server() as server:
            return (await server.get("/version", {"x-request-id": given})).headers

    headers = asyncio.run(run())
    assert (headers["x-request-id"] == given) == is_kept
    assert len(headers["x-request-id"]) > 0 and headers["openai-processing-ms"].isdigit()


def test_requests_with_the_same_id_are_answered_all() -> None:
    async def run() -> None:
        async with fake_server() as server:
            body = {"prompt": "a", "max_tokens": 5, "temperature": 0}
            calls = [server.post("/v1/completions", body, {"x-request-id": "same"}) for _ in range(50)]
            assert {reply.status for reply in await asyncio.gather(*calls)} == {200}

    asyncio.run(run())
