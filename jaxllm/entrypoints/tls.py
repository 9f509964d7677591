"""TlsFiles: the certificate that the servers show, and whose certificates they want to see."""

import ssl
from dataclasses import dataclass

from jaxllm.exceptions import ConfigError


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files, checked when this is made.

    Attributes:
      certfile: The server's certificate, then those that lead to its root.
      keyfile: Its key, without a password.
      ca_certs: Clients must bring a certificate that one of these has signed; None asks for none.

    Raises:
      ConfigError: A file can't be read or isn't what it should be.
    """

    certfile: str
    keyfile: str
    ca_certs: str | None = None

    def __post_init__(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # The empty password: without one, a key that has one would be asked for at the terminal.
            context.load_cert_chain(self.certfile, self.keyfile, password="")
        except OSError as error:
            raise ConfigError(
                f"{self.certfile} and {self.keyfile} are no certificate with its key: {_reason(error)}; "
                "set --ssl-certfile and --ssl-keyfile"
            ) from None
        if self.ca_certs is None:
            return
        try:
            context.load_verify_locations(self.ca_certs)
        except OSError as error:
            raise ConfigError(f"{self.ca_certs} holds no certificates: {_reason(error)}; set --ssl-ca-certs") from None

    @classmethod
    def from_flags(cls, certfile: str | None, keyfile: str | None, ca_certs: str | None) -> "TlsFiles | None":
        """Returns what the flags ask for, None if they ask for nothing.

        Raises:
          ConfigError: Only a part of what is needed is given, or a file can't be used.
        """
        if certfile is None and keyfile is None and ca_certs is None:
            return None
        if certfile is None or keyfile is None:
            raise ConfigError("TLS needs a certificate and its key; set --ssl-certfile and --ssl-keyfile")
        return cls(certfile=certfile, keyfile=keyfile, ca_certs=ca_certs)


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
