"""What the gRPC server is started with."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxllm.entrypoints.admission import AdmissionControl

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
      uses_generation_config: Whether the model's own sampling defaults hold for requests that bring none.
      ssl_certfile, ssl_keyfile: The server's certificate chain and key, PEM; both or none.
      ssl_ca_certs: Callers must bring a certificate signed by one of these.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_keys: Sequence[str] = field(default=(), repr=False)
    model: str
    served_model_names: Sequence[str]
    admission: AdmissionControl
    uses_generation_config: bool = True
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_ca_certs: Path | None = None

    @property
    def address(self) -> str:
        return self.host if self.host.startswith("unix:") else f"{_bracketed(self.host)}:{self.port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
