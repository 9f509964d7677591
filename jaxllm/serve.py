"""`python -m jaxllm.serve --model M`: the OpenAI-compatible server, and gRPC beside it. Parses, binds, runs.

The port answers from the first moment on; /health tells how far loading has come. Exit codes are lifecycle.py's.
"""

import signal
import socket
import sys
from collections.abc import Sequence

from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.engine_args import EngineArgs
from jaxllm.entrypoints.arg_parser import ArgParser
from jaxllm.entrypoints.server_settings import ServerSettings
from jaxllm.exceptions import EXIT_OK, EXIT_USAGE, ConfigError
from jaxllm.logger import configure_for_server


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
        return _run(engine, settings, listener)
    except ConfigError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_OK  # nothing was running yet
    finally:
        if engine is not None:
            engine.kill()


def _run(engine: AsyncLLMEngine, settings: ServerSettings, listener: socket.socket) -> int:
    try:
        # Slow imports; the model loads meanwhile.
        from jaxllm.entrypoints.openai.http_server import run_servers
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs {error.name}: install 'jaxllm[serve]'") from error
    return run_servers(engine, settings, listener)


def _make_parser() -> ArgParser:
    parser = ArgParser("jaxllm serve", "Serve a language model over the OpenAI HTTP API.")
    ServerSettings.add_cli_args(parser)
    EngineArgs.add_cli_args(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
