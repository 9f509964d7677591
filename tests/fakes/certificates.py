"""Certificates for a test: self-signed, of this machine, for two days."""

import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Returns a certificate's file and its key's."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, "-keyout", key, "-out", certificate, *names], check=True, capture_output=True)
    return certificate, key
