"""What the gRPC server is started with."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxllm.entrypoints.admission import AdmissionControl
from jaxllm.entrypoints.tls import TlsFiles

DEFAULT_PORT = 50051


@dataclass(frozen=True, kw_only=True)
class GrpcSettings:
    """What the gRPC server is started with.

    Attributes:
      host: Address to listen at; "unix:/path" is a socket in the file system, which has no port.
      port: 0 takes any free one.
      api_keys: Callers must bring one of these; none lets everybody in.
      model: What the server was told to load.
      served_model_names: The names that clients may ask for; the first stands in answers.
      admission: Who may wait; shared with the HTTP server.
      logs_requests: Whether each request makes a log line, without anything of its prompt.
      tls: Certificates; None leaves everything in the clear.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_keys: Sequence[str] = field(default=(), repr=False)
    model: str
    served_model_names: Sequence[str]
    admission: AdmissionControl
    logs_requests: bool = False
    tls: TlsFiles | None = None

    @property
    def address(self) -> str:
        return self.host if self.host.startswith("unix:") else f"{_bracketed(self.host)}:{self.port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
