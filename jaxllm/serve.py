"""`python -m jaxllm.serve --model M`: the OpenAI-compatible server, and gRPC beside it. Parses, binds, runs.

The port answers from the first moment on; /health tells how far loading has come. Exit codes are lifecycle.py's.
"""

import signal
import socket
import sys
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING

from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.engine_args import EngineArgs
from jaxllm.entrypoints.admission import AdmissionControl
from jaxllm.entrypoints.arg_parser import ArgParser
from jaxllm.entrypoints.server_settings import ServerSettings
from jaxllm.exceptions import EXIT_OK, EXIT_USAGE, ConfigError
from jaxllm.logger import configure_for_server

if TYPE_CHECKING:
    from jaxllm.entrypoints.openai.http_server import StartSideServer
    from jaxllm.entrypoints.openai.lifecycle import SideServer


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server and returns its exit code. `argv` defaults to the process's arguments."""
    args = _make_parser().parse(sys.argv[1:] if argv is None else argv)
    # Until the server handles it, SIGTERM ends the process as Ctrl-C does: in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    engine: AsyncLLMEngine | None = None
    try:
        settings = ServerSettings.from_cli_args(args)
        configure_for_server(settings.log_format)
        listener = settings.bind()
        engine = AsyncLLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
        return _run(engine, settings, listener, args.model)
    except ConfigError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_OK  # nothing was running yet
    finally:
        if engine is not None:
            engine.kill()


def _run(engine: AsyncLLMEngine, settings: ServerSettings, listener: socket.socket, model: str) -> int:
    try:
        # Slow imports; the model loads meanwhile.
        from jaxllm.entrypoints.openai.http_server import run_servers
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs {error.name}: install 'jaxllm[serve]'") from error
    return run_servers(engine, settings, listener, grpc_starter(settings, model))


def grpc_starter(settings: ServerSettings, model: str) -> "StartSideServer | None":
    """Returns what starts the gRPC server, or None where none was asked for.

    Raises:
      ConfigError: gRPC isn't installed.
    """
    if settings.grpc_port is None:
        return None
    port = settings.grpc_port
    try:
        from jaxllm.entrypoints.grpc_server.server import start_grpc_server
        from jaxllm.entrypoints.grpc_server.settings import GrpcSettings
    except ModuleNotFoundError as error:
        raise ConfigError(f"gRPC needs {error.name}: install 'jaxllm[grpc]', or leave out --grpc-port") from error

    def start(engine: AsyncLLMEngine, admission: AdmissionControl) -> "Awaitable[SideServer]":
        grpc_settings = GrpcSettings(
            host=settings.host,
            port=port,
            tls=settings.tls,
            logs_requests=settings.logs_requests,
            api_keys=settings.api_keys,
            model=model,
            served_model_names=settings.served_model_names,
            admission=admission,
        )
        return start_grpc_server(engine, grpc_settings)

    return start


def _make_parser() -> ArgParser:
    parser = ArgParser("jaxllm serve", "Serve a language model over the OpenAI HTTP API.")
    ServerSettings.add_cli_args(parser)
    EngineArgs.add_cli_args(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
