"""Who comes to a full queue is answered when his request's head is read, as he would be on the long way."""

import asyncio
import json
import re
from collections.abc import Coroutine
from typing import Any

import pytest

from jaxllm.entrypoints.admission import AdmissionControl
from jaxllm.entrypoints.openai.door import Door
from jaxllm.entrypoints.openai.gate import Gate
from tests.fakes.asgi import fake_server
from tests.fakes.http_connections import Connection, request_bytes

PATH = "/v1/completions"
BODY = json.dumps({"prompt": "a", "max_tokens": 2, "temperature": 0}).encode()
KEY = {"authorization": "Bearer key"}


async def nobody(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("a request came in")


def full_gate(api_keys: tuple[str, ...] = ()) -> Gate:
    admission = AdmissionControl(1)
    admission.admit(1)
    return Gate(nobody, admission, api_keys, None if api_keys else ("localhost",))


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 600))


def test_the_excess_of_2000_is_answered_before_any_other_begins() -> None:
    async def scenario() -> None:
        async with fake_server(max_queue=256) as server:
            assert isinstance(server.app, Gate)
            connections = [Connection(server.app, server.app) for _ in range(2000)]
            for connection in connections:
                connection.feed(request_bytes(PATH, BODY))
            # Nothing was awaited: all this is one turn of the event loop.
            assert [bool(connection.written) for connection in connections] == [False] * 256 + [True] * 1744
            assert [len(connection.tasks) for connection in connections] == [1] * 256 + [0] * 1744
            statuses = [(await connection.answers(1))[0][9:12] for connection in connections]
            assert statuses == [b"200"] * 256 + [b"429"] * 1744
            assert server.serving.admission.num_waiting == server.serving.admission.num_requests == 0
            connections[-1].feed(request_bytes(PATH, BODY))
            assert [answer[9:12] for answer in await connections[-1].answers(2)] == [b"429", b"200"]

    run(scenario())


@pytest.mark.parametrize(
    ("keys", "headers", "status"),
    [
        ((), {}, 429),
        ((), {"x-request-id": "not harmless"}, 429),
        ((), {"host": "evil.example"}, 403),
        (("key",), {}, 401),
        (("key",), {"authorization": "Bearer wrong"}, 401),
        (("key",), KEY, 429),
    ],
)
def test_early_answers_are_those_of_the_long_way(keys: tuple[str, ...], headers: dict[str, str], status: int) -> None:
    async def scenario() -> None:
        gate = full_gate(keys)
        early, late = Connection(gate, gate), Connection(gate, None)
        for connection in (early, late):
            connection.feed(request_bytes(PATH, BODY, headers))
        assert early.written and not early.tasks and late.tasks
        ((early_answer,), (late_answer,)) = (await early.answers(1), await late.answers(1))
        fresh_id = re.compile(rb"x-request-id: [0-9a-f]{32}\r")
        assert fresh_id.sub(b"", early_answer) == fresh_id.sub(b"", late_answer)
        assert int(early_answer[9:12]) == status
        assert (b"retry-after: 1\r\n" in early_answer) == (status == 429)

    run(scenario())


@pytest.mark.parametrize(
    "request_",
    [
        request_bytes(PATH, BODY, version="1.0"),
        request_bytes(PATH, BODY, {"connection": "close"}),
        request_bytes(PATH, BODY, {"expect": "100-continue"}),
        request_bytes(PATH, BODY, {"origin": "http://localhost:8000"}),
        request_bytes(PATH + "?a=b", BODY),
        request_bytes("/v1/complet%69ons", BODY),
        request_bytes(PATH, method="GET"),
    ],
)
def test_what_is_out_of_the_ordinary_takes_the_long_way(request_: bytes) -> None:
    async def scenario() -> None:
        gate = full_gate()
        early, late = Connection(gate, gate), Connection(gate, None)
        for connection in (early, late):
            connection.feed(request_)
        assert not early.written and early.tasks
        answers = await early.answers(1)
        assert answers == await late.answers(1) and answers[0][9:12] == b"429"
        assert early.is_closing() == late.is_closing()

    run(scenario())


def test_a_connection_goes_on_after_an_early_answer() -> None:
    """However the refused body comes: in pieces, in chunks, with the next request behind it."""
    chunked = request_bytes(PATH, b"", {"transfer-encoding": "chunked"}).replace(b"content-length: 0\r\n", b"")
    chunked += b"5\r\nPOST \r\n0\r\n\r\n"
    large = request_bytes(PATH, b"POST / HTTP/1.1\r\n\r\n" * 50_000)
    plain = request_bytes(PATH, BODY)

    async def scenario() -> None:
        gate = full_gate()
        connection = Connection(gate, gate)
        for start in range(0, len(large), 100_000):
            connection.feed(large[start : start + 100_000])
            assert len(await connection.answers(1)) == 1
        connection.feed(chunked + plain)
        connection.feed(plain[:-3])
        assert connection.protocol.timeout_keep_alive_task is None, "a request is being read"
        connection.feed(plain[-3:])
        assert connection.protocol.timeout_keep_alive_task is not None, "an idle connection must end"
        assert [answer[9:12] for answer in await connection.answers(4)] == [b"429"] * 4
        assert not connection.tasks
        connection.protocol.connection_lost(None)

    run(scenario())


def test_a_request_behind_one_that_is_being_answered_waits_for_its_turn() -> None:
    async def scenario() -> None:
        async with fake_server(max_queue=1) as server:
            assert isinstance(server.app, Gate)
            connection = Connection(server.app, server.app)
            connection.feed(request_bytes(PATH, BODY) * 3)
            assert not connection.written
            assert [answer[9:12] for answer in await connection.answers(3)] == [b"200"] * 3

    run(scenario())


def test_in_a_crowd_a_few_begin_a_turn_in_order() -> None:
    async def scenario() -> None:
        door = Door(AdmissionControl(30))
        entered: list[int] = []

        async def come(number: int) -> None:
            await door.enter()
            entered.append(number)

        for _ in range(30):
            assert not door.is_full
            door.expect()
        tasks = [asyncio.create_task(come(number)) for number in range(30)]
        assert door.is_full
        await asyncio.sleep(0)
        assert not entered and door.is_full, "30 are outside"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert entered == list(range(4)) and not door.is_full
        tasks[20].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert entered == [number for number in range(30) if number != 20]
        await asyncio.sleep(0)
        with pytest.raises(StopIteration):
            door.enter().send(None)  # nobody is there: it doesn't wait at all

    run(scenario())


@pytest.mark.parametrize(("max_queue", "num_requests"), [(64, 7), (None, 5000)])
def test_without_a_crowd_all_begin_at_once(max_queue: int | None, num_requests: int) -> None:
    async def scenario() -> None:
        door = Door(AdmissionControl(max_queue))
        for _ in range(num_requests):
            door.expect()
        tasks = [asyncio.create_task(door.enter()) for _ in range(num_requests)]
        await asyncio.sleep(0)
        assert all(task.done() for task in tasks)

    run(scenario())


def test_a_queue_that_fills_is_a_crowd_however_slowly_they_come() -> None:
    async def scenario() -> None:
        admission = AdmissionControl(64)
        tickets = [admission.admit(1) for _ in range(8)]
        door = Door(admission)
        assert door.enter().send(None) is not None, "it waits"
        await asyncio.sleep(0)
        tickets[0].close()
        with pytest.raises(StopIteration):
            door.enter().send(None)

    run(scenario())
