"""A gRPC server on a fake engine, on an event loop and thread of its own, so that tests are plain blocking clients."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.engine.async_mp_client import Connect
from jaxllm.engine.front_end import FrontEnd
from jaxllm.entrypoints.admission import AdmissionControl
from jaxllm.entrypoints.grpc_server import descriptors
from jaxllm.entrypoints.grpc_server.server import GrpcServerHandle, start_grpc_server
from jaxllm.entrypoints.grpc_server.settings import GrpcSettings
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.fake_cores import ThreadCore, fake_config

T = TypeVar("T")
LONG = 50_000  # tokens: at a millisecond each, longer than any test


def long_front_end() -> FrontEnd:
    """Sequences may be so long that none ends while a test looks at it."""
    return FrontEnd(fake_config(max_model_len=LONG + 100), ByteTokenizer(), [257])


class RunningServer:
    """What a test sees of a server: its address, and its engine, which belongs to the server's loop."""

    def __init__(self, load: Callable[[], FrontEnd], connect: Connect = ThreadCore, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.engine: AsyncLLMEngine = self.run(self._make_engine(load, connect))
        fields = {"port": 0, "model": "fake.gguf", "served_model_names": ["fake", "also-fake"], **settings}
        fields.setdefault("admission", AdmissionControl(None))
        self.settings = GrpcSettings(**fields)
        try:
            self.handle: GrpcServerHandle = self.run(start_grpc_server(self.engine, self.settings))
        except BaseException:
            self._close_engine()
            raise
        self.address = f"127.0.0.1:{self.handle.port}"

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 60) -> T:
        """Runs a coroutine on the server's loop and returns its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def wait_until_idle(self, timeout_s: float = 30) -> None:
        """Waits until the engine and its scheduler hold no request."""
        deadline_s = time.monotonic() + timeout_s
        while not self._is_idle():
            assert time.monotonic() < deadline_s, "requests are still running"
            time.sleep(0.02)

    def close(self) -> None:
        self.run(self.handle.stop(0))
        self._close_engine()

    def _close_engine(self) -> None:
        self.run(self.engine.shutdown())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _is_idle(self) -> bool:
        if self.engine.num_unfinished_requests:
            return False
        stats = self.run(self.engine.get_stats())
        return stats.num_running == stats.num_waiting == 0

    async def _make_engine(self, load: Callable[[], FrontEnd], connect: Connect) -> AsyncLLMEngine:
        return AsyncLLMEngine(load, connect)


@contextmanager
def running_server(
    load: Callable[[], FrontEnd] = long_front_end, is_ready: bool = True, **settings: Any
) -> Iterator[RunningServer]:
    """Runs a server for the length of a test, once it is ready."""
    server = RunningServer(load, **settings)
    try:
        if is_ready:
            server.run(server.engine.wait_ready())
        yield server
    finally:
        server.close()


class Stub:
    """Calls one service's methods by name: `stub.Generate(text="a")`. Uses our own descriptors."""

    def __init__(self, channel: grpc.Channel, service_name: str) -> None:
        self._channel = channel
        self._service = descriptors.service(service_name)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = self._service.methods_by_name.get(name)
        if method is None:
            raise AttributeError(name)
        request_class = descriptors.message_class(method.input_type.full_name)
        make = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        call = make(
            f"/{self._service.full_name}/{name}",
            request_serializer=request_class.SerializeToString,
            response_deserializer=descriptors.message_class(method.output_type.full_name).FromString,
        )

        def invoke(*, timeout: float = 60, metadata: Any = None, **fields: Any) -> Any:
            return call(request_class(**fields), timeout=timeout, metadata=metadata)

        return invoke


@contextmanager
def stub_of(server: RunningServer, service_name: str = descriptors.INFERENCE) -> Iterator[Stub]:
    with grpc.insecure_channel(server.address) as channel:
        yield Stub(channel, service_name)
