"""Starts the gRPC server on a running event loop and an engine that may still be loading."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import grpc

from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.entrypoints.grpc_server import descriptors
from jaxllm.entrypoints.grpc_server.auth import ApiKeyInterceptor
from jaxllm.entrypoints.grpc_server.engine_door import EngineDoor
from jaxllm.entrypoints.grpc_server.health import HealthService
from jaxllm.entrypoints.grpc_server.inference_service import InferenceService
from jaxllm.entrypoints.grpc_server.reflection import reflection_methods
from jaxllm.entrypoints.grpc_server.rpc import service_handler
from jaxllm.entrypoints.grpc_server.settings import GrpcSettings
from jaxllm.entrypoints.grpc_server.vllm_service import VllmEngineService
from jaxllm.entrypoints.server_settings import bind_port
from jaxllm.entrypoints.tls import TlsFiles
from jaxllm.exceptions import ConfigError
from jaxllm.logger import get_logger

MAX_REQUEST_BYTES = 8 << 20
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", -1),
    # A gateway sends everything over one connection, so this is no limit for one caller.
    ("grpc.max_concurrent_streams", 4096),
    # A second server on the same port is a mistake that should show.
    ("grpc.so_reuseport", 0),
    # Gateways ping idle connections, to find out about dead ones.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)
# Answered requests still have to send their status; a client may also hold a stream open that never ends.
_LAST_WORDS_S = 0.5
_logger = get_logger(__name__)


class GrpcServerHandle:
    """A server that runs.

    Attributes:
      port: Where it listens; 0 for a socket in the file system.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        port: int,
        door: EngineDoor,
        health: HealthService,
        following: "asyncio.Task[None]",
    ) -> None:
        self.port = port
        self._server = server
        self._door = door
        self._health = health
        self._following = following

    async def stop(self, grace_s: float) -> None:
        """Says NOT_SERVING, refuses what comes, waits up to `grace_s` for what runs, and ends the rest."""
        await self._health.close()
        await self._door.close(grace_s)
        self._following.cancel()
        await self._server.stop(_LAST_WORDS_S)


async def start_grpc_server(engine: AsyncLLMEngine, settings: GrpcSettings) -> GrpcServerHandle:
    """Starts listening at once; calls that need the model are refused until it is loaded.

    Raises:
      ConfigError: The address can't be listened on.
    """
    door = EngineDoor(engine, settings)
    health = HealthService(door)
    server = grpc.aio.server(
        handlers=_handlers(door, health), interceptors=[ApiKeyInterceptor(settings.api_keys)], options=_OPTIONS
    )
    port = _listen(server, settings)
    await server.start()
    _logger.info("gRPC listens at %s", settings.address)
    following = asyncio.get_running_loop().create_task(health.run())
    return GrpcServerHandle(server, port, door, health, following)


def _handlers(door: EngineDoor, health: HealthService) -> Sequence[grpc.GenericRpcHandler]:
    methods = {
        descriptors.INFERENCE: InferenceService(door).methods,
        descriptors.VLLM_ENGINE: VllmEngineService(door).methods,
        descriptors.HEALTH: health.methods,
        **{name: reflection_methods(name) for name in descriptors.REFLECTIONS},
    }
    return [service_handler(name, methods[name]) for name in descriptors.SERVICES]


def _listen(server: grpc.aio.Server, settings: GrpcSettings) -> int:
    address = settings.address
    if settings.port and not address.startswith("unix:"):
        # grpc's own error names no reason, and is printed as well.
        bind_port(settings.host, settings.port, "--grpc-port").close()
    try:
        if settings.tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, _credentials(settings.tls))
    except RuntimeError:
        raise ConfigError(f"gRPC can't listen on {address}; set --host or --grpc-port") from None
    return 0 if address.startswith("unix:") else int(port)


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    chain, key = Path(tls.certfile).read_bytes(), Path(tls.keyfile).read_bytes()
    roots = None if tls.ca_certs is None else Path(tls.ca_certs).read_bytes()
    return grpc.ssl_server_credentials([(key, chain)], root_certificates=roots, require_client_auth=roots is not None)
