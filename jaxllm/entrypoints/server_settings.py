"""ServerSettings: how `python -m jaxllm.serve` is started, beside the engine's arguments. Knows no web library."""

import argparse
import ipaddress
import re
import socket
from dataclasses import dataclass, field

from jaxllm import envs
from jaxllm.entrypoints.tls import TlsFiles
from jaxllm.exceptions import ConfigError
from jaxllm.logger import LogFormat

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_MAX_QUEUE = 4096
DEFAULT_SHUTDOWN_TIMEOUT_S = 30.0
_ORIGIN = re.compile(r"https?://[a-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:]+\](:[0-9]{1,5})?")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What the servers are started with.

    Attributes:
      host: Address to listen on.
      port: HTTP port; 0 takes a free one.
      grpc_port: gRPC port; None starts no gRPC server.
      tls: The certificates of both servers; None leaves everything in the clear.
      api_keys: A client must bring one of them; none lets everybody in.
      is_insecure: Whether an address that others can reach may be served without a key.
      allowed_origins: Web pages that may ask from a browser, such as "https://chat.example"; "*" allows any.
      served_model_names: What clients call the model; answers carry the first.
      max_queue: Most sequences that may wait for their first token; None sets no limit.
      shutdown_timeout_s: How long requests may go on after SIGTERM or Ctrl-C.
      logs_requests: Whether each request makes a log line. Prompts never stand in it.
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    grpc_port: int | None = None
    tls: TlsFiles | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    is_insecure: bool = False
    allowed_origins: tuple[str, ...] = ()
    served_model_names: tuple[str, ...]
    max_queue: int | None = DEFAULT_MAX_QUEUE
    shutdown_timeout_s: float = DEFAULT_SHUTDOWN_TIMEOUT_S
    logs_requests: bool = False
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        for name, port in (("port", self.port), ("grpc-port", self.grpc_port)):
            if port is not None and not 0 <= port <= 65535:
                raise ConfigError(f"{name} must be in [0, 65535], got {port}; set --{name}")
        if self.port and self.port == self.grpc_port:
            raise ConfigError(f"port and grpc-port must differ, got {self.port} for both; set --grpc-port")
        if self.max_queue is not None and self.max_queue < 1:
            raise ConfigError(f"max_queue must be at least 1, got {self.max_queue}; set --max-queue")
        if not 0 <= self.shutdown_timeout_s <= 86400:
            raise ConfigError(
                f"shutdown_timeout must be in [0, 86400] seconds, got {self.shutdown_timeout_s}; set --shutdown-timeout"
            )
        if not all(self.api_keys) or not all(self.served_model_names):
            raise ConfigError("keys and model names must not be empty; set --api-key or --served-model-name")
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"an allowed origin must be such as https://chat.example or http://localhost:3000, or *, got "
                    f"{origin!r:.80}; set --allowed-origins"
                )
        if not self.api_keys and not self.is_insecure and not self.is_loopback:
            raise ConfigError(
                f"others can reach {self.host}, and no key is set; set --api-key (or JAXLLM_API_KEY), or --insecure"
            )

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def allowed_hosts(self) -> tuple[str, ...] | None:
        """What a Host header may say, or None for anything: a web page could let its own name point at this machine."""
        if self.api_keys or not self.is_loopback:
            return None
        return ("localhost", "127.0.0.1", "[::1]", self.host)

    def bind(self) -> socket.socket:
        """Returns a socket that listens on the HTTP port, so that clients can connect from now on.

        Raises:
          ConfigError: The port or the address can't be had.
        """
        return bind_port(self.host, self.port, "--port")

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the flags that `from_cli_args` reads."""
        add = parser.add_argument_group("server").add_argument
        add("--host", default=DEFAULT_HOST, help=f"address to listen on (default: {DEFAULT_HOST})")
        add("--port", type=int, default=DEFAULT_PORT, help=f"HTTP port; 0 takes a free one (default: {DEFAULT_PORT})")
        add("--grpc-port", type=int, metavar="PORT", help="serve gRPC on this port as well, usually 50051")
        add("--ssl-certfile", metavar="FILE", help="serve HTTPS and gRPC over TLS with this certificate (PEM)")
        add("--ssl-keyfile", metavar="FILE", help="its key (PEM, without a password)")
        add("--ssl-ca-certs", metavar="FILE", help="clients must bring a certificate that one of these has signed")
        add("--api-key", action="append", default=[], metavar="KEY", help="clients must bring it; may be repeated")
        add("--insecure", action="store_true", help="serve an address that others can reach without a key")
        add(
            "--allowed-origins",
            nargs="+",
            default=[],
            metavar="ORIGIN",
            help="web pages that may ask from a browser, such as https://chat.example; * allows any (default: none)",
        )
        add("--served-model-name", nargs="+", metavar="NAME", help="what clients call the model (default: --model)")
        add(
            "--max-queue",
            type=int,
            default=DEFAULT_MAX_QUEUE,
            metavar="N",
            help="most sequences that may wait; whoever comes then gets a 429; 0 sets no limit "
            f"(default: {DEFAULT_MAX_QUEUE})",
        )
        add(
            "--shutdown-timeout",
            type=float,
            default=DEFAULT_SHUTDOWN_TIMEOUT_S,
            metavar="S",
            help=f"seconds that requests may go on after SIGTERM (default: {DEFAULT_SHUTDOWN_TIMEOUT_S:g})",
        )
        add("--enable-log-requests", action="store_true", help="log a line for each request, without its prompt")
        add("--log-format", choices=("text", "json"), default="text", help="form of log lines (default: text)")

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "ServerSettings":
        """Reads back what `add_cli_args` had parsed, and JAXLLM_API_KEY.

        Raises:
          ConfigError: A value breaks a rule.
        """
        env_key = envs.api_key()
        return cls(
            host=args.host,
            port=args.port,
            grpc_port=args.grpc_port,
            tls=TlsFiles.from_flags(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs),
            api_keys=tuple(args.api_key) + (() if env_key is None else (env_key,)),
            is_insecure=args.insecure,
            allowed_origins=tuple(args.allowed_origins),
            served_model_names=tuple(args.served_model_name or (args.model,)),
            max_queue=args.max_queue or None,
            shutdown_timeout_s=args.shutdown_timeout,
            logs_requests=args.enable_log_requests,
            log_format=args.log_format,
        )


def bind_port(host: str, port: int, flag: str) -> socket.socket:
    """Returns a listening socket.

    Raises:
      ConfigError: The port or the address can't be had; the message names the flag to change.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # As create_server does it, an address that was just in use can be had, one that is in use can't.
        listener = socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise ConfigError(f"can't listen on {host}:{port}: {reason}; set --host or {flag}") from None
    listener.setblocking(False)
    return listener
