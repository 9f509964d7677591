"""grpc.health.v1 as the official client sees it: Check, List, and each change through Watch."""

import threading
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxllm.engine.front_end import FrontEnd
from tests.fakes.grpc_servers import RunningServer, long_front_end, running_server

NAMES = ["", "jaxllm.v1.Inference", "vllm.grpc.engine.VllmEngine"]
UNKNOWN, SERVING = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN, health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Gate:
    """Holds up loading until it is opened."""

    def __init__(self, error: Exception | None = None) -> None:
        self.opened = threading.Event()
        self._error = error

    def load(self) -> FrontEnd:
        assert self.opened.wait(60)
        if self._error is not None:
            raise self._error
        return long_front_end()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def loading(gate: Gate) -> Iterator[RunningServer]:
    with running_server(gate.load, is_ready=False, api_keys=["secret"]) as server:
        yield server
        gate.opened.set()


@pytest.fixture
def health(loading: RunningServer) -> Iterator[health_pb2_grpc.HealthStub]:
    """Brings no key: probes need none."""
    with grpc.insecure_channel(loading.address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def ask(name: str = "") -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=name)


@pytest.mark.parametrize("name", NAMES)
def test_watch_sends_each_change(
    loading: RunningServer, gate: Gate, health: health_pb2_grpc.HealthStub, name: str
) -> None:
    watch = health.Watch(ask(name), timeout=60)
    assert next(watch).status == NOT_SERVING
    gate.opened.set()
    assert next(watch).status == SERVING
    loading.run(loading.handle.stop(0))
    assert next(watch).status == NOT_SERVING
    with pytest.raises((StopIteration, grpc.RpcError)):
        next(watch)


def test_watch_tells_of_the_engines_death(
    loading: RunningServer, gate: Gate, health: health_pb2_grpc.HealthStub
) -> None:
    gate.opened.set()
    watch = health.Watch(ask(), timeout=60)
    while next(watch).status != SERVING:
        pass
    loading.engine.kill()
    assert next(watch).status == NOT_SERVING


def test_check_and_list(loading: RunningServer, gate: Gate, health: health_pb2_grpc.HealthStub) -> None:
    for expected in (NOT_SERVING, SERVING):
        assert [health.Check(ask(name), timeout=60).status for name in NAMES] == [expected] * 3
        listed = health.List(health_pb2.HealthListRequest(), timeout=60).statuses
        assert {name: response.status for name, response in listed.items()} == dict.fromkeys(NAMES, expected)
        gate.opened.set()
        loading.run(loading.engine.wait_ready())


def test_services_that_nobody_knows(health: health_pb2_grpc.HealthStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(ask("nothing"), timeout=60)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert next(health.Watch(ask("nothing"), timeout=60)).status == UNKNOWN


def test_many_watches_end_with_the_server(loading: RunningServer, health: health_pb2_grpc.HealthStub) -> None:
    watches = [health.Watch(ask(), timeout=60) for _ in range(20)]
    assert [next(watch).status for watch in watches] == [NOT_SERVING] * 20
    loading.run(loading.handle.stop(30), timeout_s=20)  # nobody waits for them
